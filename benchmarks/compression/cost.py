"""Work of compressors without communication.

Host time on a rank, against the backward pass that could hide it; and PowerSGD, ours and torch's
hook, on the same gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from benchmarks.harness.turns import largest, take_turns, timed
from benchmarks.pipeline.models import ByteModel
from pyparallel.compression import (
    BufferLayout,
    Collectives,
    CommStats,
    Compressor,
    ErrorFeedback,
    Piece,
    PowerSGD,
)
from pyparallel.planning.recommend import CANDIDATES
from pyparallel.planning.recommend.profile import flat_gradients, in_buckets

BACKWARD = "backward"


@dataclass(frozen=True)
class Cost:
    """Seconds of the slowest rank in each repetition, and bytes of a step."""

    seconds: list[float]
    encode_seconds: list[float]
    decode_seconds: list[float]
    payload_bytes: int = 0


def measure_compressors(rank: int, model: ByteModel, turns: int) -> dict[str, Cost]:
    """Take turns of backward passes and compressors, which average the gradients of the last one.

    The first turns warm up: residuals fill, and thresholds are found.
    """
    torch.manual_seed(0)
    module, (inputs, target) = nn.Sequential(*model.build()), model.make_batch(1)

    def backward() -> float:
        module.zero_grad()
        loss = model.loss(module(inputs), target)
        return timed(loss.backward)

    backward()
    named = list(module.named_parameters())
    runs: dict[str, Callable[[], float | CommStats]] = {BACKWARD: backward}
    for candidate in CANDIDATES:
        if (compressor := candidate.steady_state) is not None:
            runs[candidate.name] = averaging(named, compressor)
    found = take_turns(runs, turns, before=dist.barrier)
    costs = {BACKWARD: Cost(largest(found.pop(BACKWARD)), [], [])}
    for name, all_stats in found.items():
        encode, decode = (
            [getattr(stats, f"{what}_seconds") for stats in all_stats]
            for what in ("encode", "decode")
        )
        seconds = [
            largest(each)
            for each in (list(map(sum, zip(encode, decode, strict=True))), encode, decode)
        ]
        costs[name] = Cost(*seconds, all_stats[-1].payload_bytes)
    return costs


def averaging(
    named: Sequence[tuple[str, nn.Parameter]], compressor: Compressor
) -> Callable[[], CommStats]:
    """Return what averages a copy of a model's gradients, bucket by bucket."""
    buckets, rank, device = list(in_buckets(named)), dist.get_rank(), torch.device("cpu")
    states = [compressor.init(BufferLayout.of(each), device, rank) for each in buckets]

    def run() -> CommStats:
        collectives = Collectives()
        for bucket, state in zip(buckets, states, strict=True):
            compressor.mean_(flat_gradients(bucket), state, collectives)
        return collectives.stats

    return run


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
def measure_power_sgd(rank: int, turns: int, layout: BufferLayout) -> dict[str, list[float]]:
    """Return seconds of each step by method and dtype; they take turns.

    Needs a default process group of one rank: nothing is sent, and all is local work. Both methods
    have rank 4, error feedback and a warm start.
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
    return lambda buffer: powerSGD_hook(state, Bucket(buffer, layout)).wait()


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
