"""Host time of compressors on a rank, against the backward pass that could hide it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.turns import largest, take_turns
from benchmarks.pipeline.models import ByteModel
from pyparallel.compression import BufferLayout, Collectives, CommStats, Compressor
from pyparallel.recommend import CANDIDATES
from pyparallel.recommend.profile import flat_gradients, in_buckets

BACKWARD = "backward"


@dataclass(frozen=True)
class Cost:
    """Seconds of the slowest rank in each repetition, and bytes of a step."""

    seconds: list[float]
    encode_seconds: list[float]
    decode_seconds: list[float]
    payload_bytes: int = 0


def measure(rank: int, model: ByteModel, turns: int) -> dict[str, Cost]:
    """Take turns of backward passes and compressors, which average the gradients of the last one.

    The first turns warm up: residuals fill, and thresholds are found.
    """
    torch.manual_seed(0)
    backward = Backward(model)
    backward.run()
    runs: dict[str, Callable[[], float | CommStats]] = {BACKWARD: backward.run}
    for candidate in CANDIDATES:
        if (compressor := candidate.steady_state) is not None:
            runs[candidate.name] = BucketAverage(backward.named_parameters, compressor).run
    found = take_turns(runs, turns, before=dist.barrier)
    passes = found.pop(BACKWARD)
    costs = {name: cost_of(each) for name, each in found.items()}
    return {BACKWARD: Cost(largest(passes), [], []), **costs}


def cost_of(all_stats: Sequence[CommStats]) -> Cost:
    return Cost(
        largest([stats.encode_seconds + stats.decode_seconds for stats in all_stats]),
        largest([stats.encode_seconds for stats in all_stats]),
        largest([stats.decode_seconds for stats in all_stats]),
        all_stats[-1].payload_bytes,
    )


class Backward:
    """A model with a timed backward pass."""

    def __init__(self, model: ByteModel) -> None:
        self._module = nn.Sequential(*model.build())
        self._loss = model.loss
        self._batch = model.make_batch(1)
        self.named_parameters = list(self._module.named_parameters())

    def run(self) -> float:
        """Return seconds of the backward pass alone."""
        inputs, target = self._batch
        self._module.zero_grad()
        loss = self._loss(self._module(inputs), target)
        begin = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begin


class BucketAverage:
    """A compressor with the buckets of a model."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], compressor: Compressor) -> None:
        self._compressor = compressor
        self._buckets = list(in_buckets(named))
        rank, device = dist.get_rank(), torch.device("cpu")
        self._states = [
            compressor.init(BufferLayout.of(each), device, rank) for each in self._buckets
        ]

    def run(self) -> CommStats:
        collectives = Collectives()
        for bucket, state in zip(self._buckets, self._states, strict=True):
            self._compressor.mean_(flat_gradients(bucket), state, collectives)
        return collectives.stats
