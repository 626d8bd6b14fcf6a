"""The step times of the first stage after the last stage has become slow."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.turns import Training, take_turns
from benchmarks.pipeline.models import SleepingModel
from benchmarks.pipeline.systems import System


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
        return _Delay.apply(inputs, self)

    def delay(self) -> None:
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
    steps = model.slowdown.normal + model.slowdown.slow
    runs = {each.name: partial(time_steps, each.start(model, 1), steps) for each in systems}
    return take_turns(runs, turns, warm_up=1, before=dist.barrier)


def time_steps(training: Training, steps: int) -> list[float]:
    """Return the seconds of each step, from an empty pipeline to an empty pipeline."""
    times = [time.perf_counter()]
    for _ in range(steps):
        training.step()
        times.append(time.perf_counter())
    training.finish()
    return [end - begin for begin, end in pairwise(times)]
