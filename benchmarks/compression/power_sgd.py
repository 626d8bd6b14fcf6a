"""Time of PowerSGD without communication: ours and torch's hook, on the same gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from benchmarks.harness.turns import take_turns, timed
from pyparallel.compression import BufferLayout, Collectives, ErrorFeedback, Piece, PowerSGD

OURS, TORCH = "PowerSGD", "torch powerSGD_hook"
RANK = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer(num_layers: int = 6, width: int = 384) -> BufferLayout:
    """Return the parameters of a transformer, 10.6 million by default."""
    matrices = {
        "attention": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in matrices.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    shapes |= {f"norm{i}.{name}": (width,) for i in (1, 2) for name in ("weight", "bias")}
    return BufferLayout(
        tuple(
            Piece(f"{layer}.{name}", shape)
            for layer in range(num_layers)
            for name, shape in shapes.items()
        )
    )


@torch.no_grad()
def measure(rank: int, turns: int, layout: BufferLayout) -> dict[str, list[float]]:
    """Return seconds of each step by method and dtype; they take turns.

    Needs a default process group of one rank: nothing is sent, and all is local work. Both methods
    have rank 4, error feedback and a warm start.

    Args:
        rank: of this process.
        turns: repetitions after the warm-up.
        layout: layout of the bucket.
    """
    gradients = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))

    def run_of(average: Callable[[Tensor], object], own: Tensor) -> Callable[[], float]:
        buffer = own.clone()

        def run() -> float:
            buffer.copy_(own)
            return timed(average, buffer)

        return run

    runs = {
        f"{method}, {name}": run_of(make(layout), gradients.to(dtype))
        for name, dtype in DTYPES.items()
        for method, make in ((OURS, ours), (TORCH, of_torch))
    }
    return take_turns(runs, turns)


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
    """The interface of DDP's buckets that the hook uses, of the only one."""

    flat: Tensor
    layout: BufferLayout

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.layout.split(self.flat)

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True
