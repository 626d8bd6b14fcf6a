"""The workload of a step: the user's own model, or a transformer of a given size."""

import importlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...training.arguments import require
from ..simulate import Profile
from .profile import BUCKET_BYTES, Bucket, in_buckets, num_bytes_of, timed

_WARM_UP = 2
_BYTES = 256


@dataclass(frozen=True)
class Workload:
    """A module, a batch, and a loss function of both."""

    module: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]  # runs the forward, and returns a 0-d tensor
    bucket_bytes: tuple[int, int] = BUCKET_BYTES  # of the first gradient bucket, and of the others

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that require gradients, with their names."""
        return [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of a step's gradients."""
        return num_bytes_of(self.named_parameters)

    @property
    def num_parameters(self) -> int:
        """Return the number of elements that require gradients."""
        return sum(parameter.numel() for _, parameter in self.named_parameters)

    @property
    def buckets(self) -> list[Bucket]:
        """Return the buckets of gradients, in the order in which they are ready."""
        return list(in_buckets(self.named_parameters, self.bucket_bytes))

    def measure(self, repeats: int) -> Profile:
        """Measure a step, medians of some; leaves the gradients of the last one."""
        device = self.named_parameters[0][1].device
        passes = [self._step(device) for _ in range(_WARM_UP + repeats)][_WARM_UP:]
        forward, backward = (statistics.median(each) for each in zip(*passes, strict=True))
        return Profile(forward + backward, forward / (forward + backward))

    def _step(self, device: torch.device) -> tuple[float, float]:
        self.module.zero_grad()
        losses: list[Tensor] = []
        forward = timed(lambda: losses.append(self.loss(self.module, self.batch)), device)
        return forward, timed(losses[0].backward, device)


def load(path: str) -> Workload:
    """Create a workload from a function of the user, ``package.module:function``.

    It returns ``(module, batch, loss)`` as for `Workload`; else there is a ValueError.
    """
    module_name, _, name = path.partition(":")
    rule = "--model must be package.module:function"
    require(module_name and name, rule, path)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{rule} that can be imported, got {path}: {error}") from error
    result = function()
    fits = isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], nn.Module)
    rule = "--model must name a function that returns (module, batch, loss)"
    require(fits, rule, f"{path} that returned {type(result).__name__}")
    workload = Workload(*result)
    if not workload.named_parameters:
        raise ValueError(f"--model must have parameters that require gradients, {path} has none")
    return workload


def transformer(num_parameters: float, batch: int, length: int, device: torch.device) -> Workload:
    """Create a byte-level transformer of about this size, 80,000 parameters or more."""
    for name, value in (("--parameters", num_parameters), ("--batch", batch), ("--length", length)):
        require(1 <= value < math.inf, f"{name} must be at least 1", f"{value:g}")
    heads = max(1, round((64 * num_parameters / 12) ** (1 / 3) / 64))
    width = 64 * heads
    depth = max(1, round((num_parameters - 2 * _BYTES * width) / (12 * width**2)))
    blocks = [
        nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(depth)
    ]
    module = nn.Sequential(nn.Embedding(_BYTES, width), *blocks, nn.Linear(width, _BYTES))
    text = torch.randint(_BYTES, (batch, length + 1), device=device)
    return Workload(module.to(device), text, next_byte_loss)


def next_byte_loss(module: nn.Module, text: Tensor) -> Tensor:
    """Return the next-byte cross-entropy in nats of ``text``, (batch, length + 1) int64."""
    logits = module(text[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
