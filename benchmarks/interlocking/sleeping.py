"""Interlocking backpropagation with all windows, in pipelines whose stages and heads sleep.

The last stage may become slow: then the step times of the first stage are measured.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.turns import Training, take_turns
from benchmarks.pipeline.models import Model, SleepingLayer, SleepingModel
from benchmarks.pipeline.systems import Plan, System, ours, peers, start, time_steps
from benchmarks.pipeline.systems.ours import OurSchedule
from pyparallel.pipeline import Head, Interlocking
from pyparallel.pipeline.messages import Value


@dataclass(frozen=True)
class SleepingHead(Head):
    """A head that sleeps, and returns its input."""

    forward: float
    backward: float  # seconds per microbatch, half for its input, half for its weight

    def build(self, example: Value) -> nn.Module:
        return SleepingLayer(self.forward, self.backward)


def every_window(num_stages: int, head: Head) -> list[OurSchedule]:
    return [OurSchedule(Interlocking(size, head)) for size in range(1, num_stages + 1)]


def end_to_end(num_ranks: int, num_microbatches: int) -> list[System]:
    """Return the systems with full backpropagation: 1F1B, ours and torch's, and PipeOptim.

    Torch's needs at least as many microbatches as stages.
    """
    torchs = [peers.ONE_FORWARD_ONE_BACKWARD] if num_microbatches >= num_ranks else []
    return [ours.ONE_FORWARD_ONE_BACKWARD, *torchs, ours.PIPE_OPTIM]


def measure_windows(
    rank: int, model: Model, systems: Sequence[System], num_microbatches: int, plan: Plan
) -> dict[str, list[float]]:
    return time_steps(start(systems, model, num_microbatches), num_microbatches, plan)


@dataclass(frozen=True)
class Slowdown:
    """When and by how much the last stage is slow, in steps of one microbatch."""

    normal: int  # number of steps at full speed, from an empty pipeline
    slow: int  # number of slow steps after those, until the flush
    seconds: float  # extra time of a slow backward

    def delay(self, backward: int) -> float:
        return self.seconds if backward % (self.normal + self.slow) >= self.normal else 0.0


@dataclass(frozen=True)
class StragglingModel(SleepingModel):
    """Layers that sleep, followed by a straggler."""

    slowdown: Slowdown

    def build(self) -> list[nn.Module]:
        return [*super().build(), Straggler(self.slowdown)]


class Straggler(nn.Module):
    """An identity whose backward is sometimes slow."""

    def __init__(self, slowdown: Slowdown) -> None:
        super().__init__()
        self._slowdown = slowdown
        self._backwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs.clone()
        if outputs.requires_grad:
            outputs.register_hook(self._delay)
        return outputs

    def _delay(self, gradient: Tensor) -> None:
        time.sleep(self._slowdown.delay(self._backwards))
        self._backwards += 1


def measure_straggler(
    rank: int, model: StragglingModel, systems: Sequence[System], turns: int
) -> dict[str, list[list[float]]]:
    """Measure all systems in turns; return the seconds of each step on this rank, by turn.

    Without the first turn, in which ranks connect.
    """
    steps = model.slowdown.normal + model.slowdown.slow
    runs = {each.name: partial(time_each_step, each.start(model, 1), steps) for each in systems}
    return take_turns(runs, turns, warm_up=1, before=dist.barrier)


def time_each_step(training: Training, steps: int) -> list[float]:
    """Return the seconds of each step, from an empty pipeline to an empty pipeline."""
    times = [time.perf_counter()]
    for _ in range(steps):
        training.step()
        times.append(time.perf_counter())
    training.finish()
    return [end - begin for begin, end in pairwise(times)]
