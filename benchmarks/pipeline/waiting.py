"""The time in which ranks wait for messages, over a link that is slow: ours and torch's.

A rank waits from the end of a computation to the begin of the next one. What it waits for is what
the next one reads: a forward of the last stage, activations; a backward of the first, gradients.
"""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.harness.turns import take_turns
from benchmarks.pipeline.models import Model
from benchmarks.pipeline.systems import Plan, System, start
from benchmarks.pipeline.systems.ours import OurTraining
from benchmarks.pipeline.systems.peers import TorchTraining
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
        self.training = training
        self._recorded: list[Computation] = []
        if isinstance(training, TorchTraining):
            for stage in training.stages:
                self._record(stage, "forward_one_chunk", Kind.FORWARD)
                self._record(stage, "backward_one_chunk", Kind.BACKWARD)
            for optimizer in training.optimizers:
                self._record(optimizer, "step", Kind.UPDATE)

    def step(self) -> list[Computation]:
        self._recorded.clear()
        self.training.step()
        if isinstance(self.training, OurTraining):
            spans = self.training.trainer.spans
            return [Computation(s.action.kind, s.begin, s.end) for s in spans]
        return list(self._recorded)

    def _record(self, owner: Any, name: str, kind: Kind) -> None:
        function = getattr(owner, name)

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
    steps = plan.steps(num_microbatches)
    kind = Kind.FORWARD if rank == dist.get_world_size() - 1 else Kind.BACKWARD

    def run(recorder: Recorder) -> float:
        computations = recorder.step()[-1:]  # of the warm-up: where the next wait begins
        for _ in range(steps):
            computations += recorder.step()
        recorder.training.finish()
        return waits(computations, kind) / (steps * num_microbatches)

    runs = {name: partial(run, Recorder(training)) for name, training in trainings.items()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, take_turns(runs, plan.turns, 0, dist.barrier))
    return {name: {GRADIENTS: of_ranks[0][name], ACTIVATIONS: of_ranks[-1][name]} for name in runs}


def waits(computations: Iterable[Computation], kind: Kind) -> float:
    """Return the seconds before computations of a kind since the ones before them."""
    return sum(after.begin - before.end for before, after in pairwise(computations)
               if after.kind is kind)  # fmt: skip
