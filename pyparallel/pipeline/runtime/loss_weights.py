"""The weights of microbatches' losses in the mean over a step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...training import summarize
from ...training.host_copy import HostCopy, host_values

LossWeightFn = Callable[[Any], float | Tensor]


def compute_loss_weights(
    loss_weight_fn: LossWeightFn, targets: Sequence[Any], first: int
) -> list[float] | str:
    """Return the weight of each microbatch's loss, or why there are none; the host waits once."""
    found: list[float | Tensor] = []
    for microbatch, target in enumerate(targets, first):
        try:
            with torch.no_grad():
                weight = loss_weight_fn(target)
        except Exception as error:  # ranks without a target would wait for this one
            return _error(microbatch, f"{type(error).__name__}: {error}")
        is_number = isinstance(weight, int | float) or (
            isinstance(weight, Tensor) and not weight.dim() and not weight.is_complex()
        )
        if not is_number:
            return _error(microbatch, summarize(weight))
        found.append(weight)
    tensors = [each for each in found if isinstance(each, Tensor)]
    if tensors:
        device = tensors[0].device
        stacked = torch.stack([tensor.double().to(device) for tensor in tensors])
        known = iter(host_values(HostCopy(stacked)))
        found = [next(known) if isinstance(each, Tensor) else each for each in found]
    weights = [float(each) for each in found]
    for microbatch, weight in enumerate(weights, first):
        if not 0 <= weight < math.inf:
            return _error(microbatch, f"{weight:g}")
    return weights


def _error(microbatch: int, what: str) -> str:
    return (
        "loss_weight_fn must return a finite number, 0 or more, for the target of each microbatch, "
        f"got {what} for microbatch {microbatch}"
    )
