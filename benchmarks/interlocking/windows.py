"""Interlocking backpropagation with all windows, in pipelines whose stages and heads sleep."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from benchmarks.pipeline.models import Model, SleepingLayer
from benchmarks.pipeline.systems import Plan, System, ours, peers, start, time_steps
from benchmarks.pipeline.systems.ours import OurSchedule
from pyparallel.pipeline import Head, Interlocking
from pyparallel.pipeline.messages import Value


@dataclass(frozen=True)
class SleepingHead(Head):
    """A head that sleeps, and returns its input.

    Args:
        forward: seconds per microbatch.
        backward: seconds per microbatch, half for its input, half for its weight.
    """

    forward: float
    backward: float

    def build(self, example: Value) -> nn.Module:
        return SleepingLayer(self.forward, self.backward)


@dataclass(frozen=True)
class OurWindow(OurSchedule):
    """PipelineTrainer with interlocking backpropagation."""

    schedule: Interlocking

    @property
    def name(self) -> str:
        return f"Interlocking, window {self.schedule.window}"


def every_window(num_stages: int, head: Head) -> list[OurSchedule]:
    return [OurWindow(Interlocking(size, head)) for size in range(1, num_stages + 1)]


def end_to_end(num_ranks: int, num_microbatches: int) -> list[System]:
    """Return the systems with full backpropagation: 1F1B, ours and torch's, and PipeOptim.

    Torch's needs at least as many microbatches as stages.
    """
    torchs = [peers.ONE_FORWARD_ONE_BACKWARD] if num_microbatches >= num_ranks else []
    return [ours.ONE_FORWARD_ONE_BACKWARD, *torchs, ours.PIPE_OPTIM]


def measure(
    rank: int, model: Model, systems: Sequence[System], num_microbatches: int, plan: Plan
) -> dict[str, list[float]]:
    return time_steps(start(systems, model, num_microbatches), num_microbatches, plan)
