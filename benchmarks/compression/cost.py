"""What compressors cost the processor of a rank, against the backward pass they would hide in."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.pipeline.models import ByteModel
from benchmarks.pipeline.turns import slowest
from pyparallel.compression import BufferLayout, Collectives, CommStats, Compressor
from pyparallel.recommend import CANDIDATES
from pyparallel.recommend.profile import flat_gradients, in_buckets

BACKWARD = "backward"
WARM_UP = 3  # turns: residuals fill, and thresholds are found


@dataclass(frozen=True)
class Cost:
    """Seconds of the slowest rank in each turn, and bytes of a step."""

    seconds: list[float]
    encode_seconds: list[float]
    decode_seconds: list[float]
    payload_bytes: int = 0


def measure(rank: int, model: ByteModel, turns: int) -> dict[str, Cost]:
    """The backward and the compressors take turns; each averages that backward's gradients."""
    torch.manual_seed(0)
    backward = Backward(model)
    coders = {
        candidate.name: Coder(backward.named_parameters, compressor)
        for candidate in CANDIDATES
        if (compressor := candidate.steady_state) is not None
    }
    passes: list[float] = []
    meters: dict[str, list[CommStats]] = {name: [] for name in coders}
    order = random.Random(0)  # the same on all ranks
    for turn in range(WARM_UP + turns):
        dist.barrier()
        seconds = backward.run()
        passes += [seconds] if turn >= WARM_UP else []
        for name in order.sample(list(coders), len(coders)):
            dist.barrier()
            meter = coders[name].run()
            meters[name] += [meter] if turn >= WARM_UP else []
    costs = {name: of_meters(each) for name, each in meters.items()}
    return {BACKWARD: Cost(slowest(passes), [], []), **costs}


def of_meters(meters: Sequence[CommStats]) -> Cost:
    return Cost(
        slowest([meter.encode_seconds + meter.decode_seconds for meter in meters]),
        slowest([meter.encode_seconds for meter in meters]),
        slowest([meter.decode_seconds for meter in meters]),
        meters[-1].payload_bytes,
    )


class Backward:
    """A model that finds its gradients."""

    def __init__(self, model: ByteModel) -> None:
        self._module = nn.Sequential(*model.build())
        self._loss = model.loss
        self._batch = model.make_batch(1)

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Of the model."""
        return list(self._module.named_parameters())

    def run(self) -> float:
        """Seconds of the backward alone."""
        inputs, target = self._batch
        self._module.zero_grad()
        loss = self._loss(self._module(inputs), target)
        begin = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begin


class Coder:
    """A compressor with the buckets of a model."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], compressor: Compressor) -> None:
        self._compressor = compressor
        self._buckets = list(in_buckets(named))
        rank, device = dist.get_rank(), torch.device("cpu")
        self._states = [
            compressor.init(BufferLayout.of(each), device, rank) for each in self._buckets
        ]

    def run(self) -> CommStats:
        """Average the model's gradients, of which it works on a copy."""
        ranks = Collectives()
        for bucket, state in zip(self._buckets, self._states, strict=True):
            self._compressor.mean_(flat_gradients(bucket), state, ranks)
        return ranks.meter
