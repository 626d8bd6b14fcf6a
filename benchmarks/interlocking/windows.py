"""Interlocking backpropagation with every window, in pipelines whose stages and heads sleep."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from benchmarks.pipeline import ours, peers
from benchmarks.pipeline.models import Model, SleepingLayer
from benchmarks.pipeline.ours import OurSchedule
from benchmarks.pipeline.systems import System
from benchmarks.pipeline.turns import Plan, start, take_turns
from pyparallel.comm import Value
from pyparallel.pipeline import Head, Interlocking


@dataclass(frozen=True)
class SleepingHead(Head):
    """Takes its time, and hands on what it is given.

    Args:
        forward: seconds of a microbatch.
        backward: likewise; half of it is for its input, half for its weight.
    """

    forward: float
    backward: float

    def build(self, example: Value) -> nn.Module:
        """A layer that fits anything."""
        return SleepingLayer(self.forward, self.backward)


@dataclass(frozen=True)
class OurWindow(OurSchedule):
    """PipelineTrainer with gradients that travel a limited way."""

    schedule: Interlocking

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"Interlocking, window {self.schedule.window}"


def every_window(num_stages: int, head: Head) -> list[OurSchedule]:
    """From local learning to end to end."""
    return [OurWindow(Interlocking(size, head)) for size in range(1, num_stages + 1)]


def end_to_end(num_ranks: int, num_microbatches: int) -> list[System]:
    """What gradients travel all the way in: 1F1B that flushes, torch's too, and one that streams.

    Torch's takes no fewer microbatches than it has stages.
    """
    torchs = [peers.ONE_FORWARD_ONE_BACKWARD] if num_microbatches >= num_ranks else []
    return [ours.ONE_FORWARD_ONE_BACKWARD, *torchs, ours.PIPE_OPTIM]


def measure(
    rank: int, model: Model, systems: Sequence[System], num_microbatches: int, plan: Plan
) -> dict[str, list[float]]:
    """All systems in turns: seconds of a call in each turn, on the slowest rank."""
    trainings = start(systems, model, num_microbatches)
    seconds = take_turns(trainings, num_microbatches, plan)
    return {name: [num_microbatches * each for each in times] for name, times in seconds.items()}
