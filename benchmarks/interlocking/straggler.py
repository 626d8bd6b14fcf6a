"""The step times of the first stage after the last stage has become slow."""

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
class Slowdown:
    """When and by how much the last stage is slow, in steps of one microbatch.

    Args:
        normal: number of steps at full speed, from an empty pipeline.
        slow: number of slow steps after those, until the flush.
        seconds: extra time of a slow backward.
    """

    normal: int
    slow: int
    seconds: float

    def delay(self, backward: int) -> float:
        """Return the extra seconds of backward number ``backward``."""
        return self.seconds if backward % (self.normal + self.slow) >= self.normal else 0.0


@dataclass(frozen=True)
class StragglingModel(SleepingModel):
    """Layers that sleep, followed by a straggler."""

    slowdown: Slowdown

    def build(self) -> list[nn.Module]:
        """Return the layers and the straggler."""
        return [*super().build(), Straggler(self.slowdown)]


class Straggler(nn.Module):
    """An identity whose backward is sometimes slow."""

    def __init__(self, slowdown: Slowdown) -> None:
        super().__init__()
        self._slowdown = slowdown
        self._backwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a copy of the inputs."""
        return _Delay.apply(inputs, self)

    def delay(self) -> None:
        """Count a backward, and sleep if it is a slow one."""
        time.sleep(self._slowdown.delay(self._backwards))
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
    """Measure all systems in turns; return the seconds of each step on this rank, by turn.

    Without the first turn, in which ranks connect.
    """
    trainings = {system.name: system.start(model, 1) for system in systems}
    seconds: dict[str, list[list[float]]] = {name: [] for name in trainings}
    order = random.Random(0)  # the same on all ranks
    steps = model.slowdown.normal + model.slowdown.slow
    for _ in range(turns + 1):
        for name in order.sample(list(trainings), len(trainings)):
            seconds[name].append(time_steps(trainings[name], steps))
    return {name: times[1:] for name, times in seconds.items()}


def time_steps(training: Training, steps: int) -> list[float]:
    """Return the seconds of each step, from an empty pipeline to an empty pipeline."""
    dist.barrier()
    times = [time.perf_counter()]
    for _ in range(steps):
        training.step()
        times.append(time.perf_counter())
    training.finish()
    return [end - begin for begin, end in pairwise(times)]
