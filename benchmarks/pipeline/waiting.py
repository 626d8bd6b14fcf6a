"""The time in which ranks wait for messages, over a link that is slow: ours and torch's.

A rank waits from the end of a computation to the begin of the next one. What it waits for is what
the next one reads: a forward of the last stage, activations; a backward of the first, gradients.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.pipeline.models import Model
from benchmarks.pipeline.systems import System
from benchmarks.pipeline.systems.ours import OurTraining
from benchmarks.pipeline.systems.peers import TorchTraining
from benchmarks.pipeline.turns import Plan, start
from pyparallel.pipeline import Kind

ACTIVATIONS = "the last stage waits for activations"
GRADIENTS = "the first stage waits for gradients"


class Computation(NamedTuple):
    """A forward, backward or update, in seconds of this process's clock."""

    kind: Kind
    begin: float
    end: float


class Recorder:
    """Records the computations of one training on this rank."""

    def __init__(self, training: OurTraining | TorchTraining) -> None:
        self._training = training
        self._recorded: list[Computation] = []
        if isinstance(training, TorchTraining):
            for stage in training.stages:
                self._record(stage, "forward_one_chunk", Kind.FORWARD)
                self._record(stage, "backward_one_chunk", Kind.BACKWARD)
            for optimizer in training.optimizers:
                self._record(optimizer, "step", Kind.UPDATE)

    def step(self) -> list[Computation]:
        """Step; return its computations."""
        self._recorded.clear()
        self._training.step()
        if isinstance(self._training, OurTraining):
            return [Computation(s.action.kind, s.begin, s.end) for s in self._training.spans]
        return list(self._recorded)

    def finish(self) -> None:
        """Flush the pipeline."""
        self._training.finish()

    def _record(self, owner: Any, name: str, kind: Kind) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self._recorded.append(Computation(kind, begin, time.perf_counter()))
            return result

        setattr(owner, name, timed)


def measure(
    rank: int, model: Model, systems: Sequence[System], num_microbatches: int, plan: Plan
) -> dict[str, dict[str, list[float]]]:
    """Return for each system and kind of wait its seconds per microbatch, in each turn."""
    trainings: Any = start(systems, model, num_microbatches)
    recorders = {name: Recorder(training) for name, training in trainings.items()}
    order = random.Random(0)  # the same on all ranks
    steps = max(1, plan.microbatches // num_microbatches)
    own: dict[str, list[float]] = {name: [] for name in recorders}
    kind = Kind.FORWARD if rank == dist.get_world_size() - 1 else Kind.BACKWARD
    for _ in range(plan.turns):
        for name in order.sample(list(recorders), len(recorders)):
            recorder = recorders[name]
            dist.barrier()
            computations = recorder.step()[-1:]  # of the warm-up: where the next wait begins
            for _ in range(steps):
                computations += recorder.step()
            recorder.finish()
            own[name].append(waits(computations, kind) / (steps * num_microbatches))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return {
        name: {GRADIENTS: of_ranks[0][name], ACTIVATIONS: of_ranks[-1][name]} for name in recorders
    }


def waits(computations: Iterable[Computation], kind: Kind) -> float:
    """Return the seconds before computations of a kind since the ones before them."""
    return sum(after.begin - before.end for before, after in pairwise(computations)
               if after.kind is kind)  # fmt: skip
