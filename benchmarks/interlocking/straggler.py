"""How long the first stage takes for its steps once the last one has become slow."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.models import SleepingModel
from benchmarks.pipeline.systems import System, Training


@dataclass(frozen=True)
class Lateness:
    """When the last stage is late, in step after step of one microbatch.

    Args:
        quiet: steps in which it is not, from an empty pipe.
        slow: steps after those in which it is, until the pipe is emptied.
        seconds: that its backward then takes longer.
    """

    quiet: int
    slow: int
    seconds: float

    def of(self, backward: int) -> float:
        """Seconds that a backward takes longer, of those counted from the beginning."""
        return self.seconds if backward % (self.quiet + self.slow) >= self.quiet else 0.0


@dataclass(frozen=True)
class StragglingModel(SleepingModel):
    """Layers that sleep, the last of them longer in some backwards."""

    lateness: Lateness

    def build(self) -> list[nn.Module]:
        """One layer more."""
        return [*super().build(), Straggler(self.lateness)]


class Straggler(nn.Module):
    """Hands its input on, and sometimes takes its time backward."""

    def __init__(self, lateness: Lateness) -> None:
        super().__init__()
        self._lateness = lateness
        self._backwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs."""
        return _Delay.apply(inputs, self)

    def delay(self) -> None:
        """Count one backward more, and sleep if it is late."""
        time.sleep(self._lateness.of(self._backwards))
        self._backwards += 1


class _Delay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, straggler: Straggler) -> Tensor:
        ctx.straggler = straggler
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.straggler.delay()
        return gradient, None


def measure(
    rank: int, model: StragglingModel, systems: Sequence[System], turns: int
) -> dict[str, list[list[float]]]:
    """All systems in turns: seconds of each step on this rank, turn by turn.

    The first turn, in which ranks connect, is left out.
    """
    trainings = {system.name: system.start(model, 1) for system in systems}
    seconds: dict[str, list[list[float]]] = {name: [] for name in trainings}
    order = random.Random(0)  # the same on all ranks
    steps = model.lateness.quiet + model.lateness.slow
    for _ in range(turns + 1):
        for name in order.sample(list(trainings), len(trainings)):
            seconds[name].append(time_steps(trainings[name], steps))
    return {name: times[1:] for name, times in seconds.items()}


def time_steps(training: Training, steps: int) -> list[float]:
    """Seconds of each, from an empty pipe to an empty pipe."""
    dist.barrier()
    times = [time.perf_counter()]
    for _ in range(steps):
        training.step()
        times.append(time.perf_counter())
    training.finish()
    return [end - begin for begin, end in pairwise(times)]
