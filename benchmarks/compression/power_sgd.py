"""Time of PowerSGD without communication: ours and torch's hook, on the same gradients."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from pyparallel.compression import BufferLayout, Collectives, ErrorFeedback, Piece, PowerSGD

OURS, TORCH = "PowerSGD", "torch powerSGD_hook"
RANK = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WARM_UPS = 3


def transformer(num_layers: int = 6, width: int = 384) -> BufferLayout:
    """Return the parameters of a transformer, 10.6 million by default."""
    shapes: dict[str, tuple[int, ...]] = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attention.weight": (3 * width, width),
        "attention.bias": (3 * width,),
        "out.weight": (width, width),
        "out.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
    }
    return BufferLayout(
        tuple(
            Piece(f"{layer}.{name}", shape)
            for layer in range(num_layers)
            for name, shape in shapes.items()
        )
    )


@torch.no_grad()
def measure(turns: int, layout: BufferLayout | None = None) -> dict[str, list[float]]:
    """Return seconds of each step by method and dtype, alternating in random order.

    Needs a default process group of one rank: nothing is sent, and all is local work. Both methods
    have rank 4, error feedback and a warm start.

    Args:
        turns: repetitions after the warm-up.
        layout: layout of the bucket; None: that of a transformer.
    """
    layout = layout or transformer()
    gradients = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    steps = {
        f"{method}, {name}": Step(make(layout), gradients.to(dtype))
        for name, dtype in DTYPES.items()
        for method, make in ((OURS, ours), (TORCH, of_torch))
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for turn in range(turns + WARM_UPS):
        for name in order.sample(list(steps), len(steps)):
            elapsed = steps[name].run()
            if turn >= WARM_UPS:
                seconds[name].append(elapsed)
    return seconds


class Step:
    """Averages the same gradients repeatedly."""

    def __init__(self, average: Callable[[Tensor], object], gradients: Tensor) -> None:
        self._average = average
        self._gradients = gradients
        self._buffer = gradients.clone()

    def run(self) -> float:
        """Return seconds of one average."""
        self._buffer.copy_(self._gradients)
        begin = time.perf_counter()
        self._average(self._buffer)
        return time.perf_counter() - begin


def ours(layout: BufferLayout) -> Callable[[Tensor], object]:
    """Return an average as in the DDP hook's worker."""
    compressor, collectives = ErrorFeedback(PowerSGD(RANK)), Collectives()
    state = compressor.init(layout, torch.device("cpu"), collectives.rank)
    return lambda buffer: compressor.mean_(buffer, state, collectives)


def of_torch(layout: BufferLayout) -> Callable[[Tensor], object]:
    """Return torch's hook, past its uncompressed steps."""
    state: Any = PowerSGDState(None, RANK, start_powerSGD_iter=2)
    state.iter = 2
    # It expects a GradBucket, which only DDP can create.
    return lambda buffer: powerSGD_hook(state, Bucket(buffer, layout)).wait()  # type: ignore[arg-type]


@dataclass(frozen=True)
class Bucket:
    """The interface of DDP's buckets that the hook uses."""

    flat: Tensor
    layout: BufferLayout

    def buffer(self) -> Tensor:
        """Return all gradients, flat."""
        return self.flat

    def gradients(self) -> list[Tensor]:
        """Return each gradient in its shape."""
        return self.layout.split(self.flat)

    def index(self) -> int:
        """Return 0: it is the only one."""
        return 0

    def is_last(self) -> bool:
        """Return True: it is the only one."""
        return True
