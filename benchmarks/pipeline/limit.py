"""The upper limit of a pipeline's speed: all stages compute without waiting; systems beside it."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.models import Model, build_stages
from benchmarks.pipeline.systems import (
    ADAMW,
    Plan,
    System,
    copies_by_stage,
    make_optimizer,
    start,
    time_microbatches,
)


class StageAlone:
    """This rank's stage, on tensors of the shapes that the other stages would send."""

    def __init__(self, model: Model) -> None:
        stages, rank = build_stages(model, dist.get_world_size()), dist.get_rank()
        self.stage = stages[rank]
        self._loss = model.loss
        inputs, target = model.make_batch(1)
        with torch.no_grad():
            for stage in stages[:rank]:
                inputs = stage(inputs)
            self._gradient = torch.randn_like(self.stage(inputs))
        self._inputs = inputs.requires_grad_(rank > 0)
        self._target: Tensor | None = target if self.stage is stages[-1] else None

    def forward(self) -> Tensor:
        """Run one microbatch: return the output, or the loss on the last stage."""
        output: Tensor = self.stage(self._inputs)
        return output if self._target is None else self._loss(output, self._target)

    def backward(self, output: Tensor) -> None:
        self._inputs.grad = None
        self.stage.zero_grad()
        output.backward(self._gradient if self._target is None else None)


@dataclass(frozen=True)
class Limit:
    """A system in which each rank trains its stage alone, with an update per microbatch.

    Args:
        optimizer: the class of AdamW.
    """

    name: ClassVar[str] = "no waiting, no messages"
    optimizer: str = ADAMW

    def start(self, model: Model, num_microbatches: int) -> "LimitTraining":
        return LimitTraining(StageAlone(model), num_microbatches, self.optimizer)


class LimitTraining:
    """Forward, backward and update of one stage.

    It runs as many forwards ahead as in a pipeline, whose activations occupy the caches.
    """

    def __init__(self, alone: StageAlone, num_microbatches: int, optimizer: str) -> None:
        self._alone = alone
        self._in_flight: deque[Tensor] = deque()
        self._ahead = dist.get_world_size() - 1 - dist.get_rank()
        self._num_microbatches = num_microbatches
        # Separate parameters: autograd would refuse an update between a forward and its backward.
        self._weights = [nn.Parameter(each.data) for each in alone.stage.parameters()]
        self._optimizer = make_optimizer(self._weights, optimizer)

    def step(self) -> None:
        for _ in range(self._num_microbatches):
            self._in_flight.append(self._alone.forward())
            if len(self._in_flight) > self._ahead:
                self._backward_and_update()

    def finish(self) -> None:
        while self._in_flight:
            self._backward_and_update()

    def _backward_and_update(self) -> None:
        self._alone.backward(self._in_flight.popleft())
        for weight, parameter in zip(self._weights, self._alone.stage.parameters(), strict=True):
            weight.grad = parameter.grad
        self._optimizer.step()
        for weight in self._weights:
            weight.grad = None


class Speed(NamedTuple):
    """The measurements of one system.

    Args:
        seconds: per microbatch in each turn, on the slowest rank.
        weight_copies: peak number of each stage; empty: not counted.
    """

    seconds: list[float]
    weight_copies: list[int]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure_speeds(
    rank: int,
    model: Model,
    systems: Sequence[System],
    num_microbatches: int,
    plan: Plan,
    optimizer: str = ADAMW,
) -> dict[str, Speed]:
    pipelines = start(systems, model, num_microbatches)
    limit = start([Limit(optimizer)], model, num_microbatches)
    seconds = time_microbatches(limit | pipelines, num_microbatches, plan)
    return {
        name: Speed(times, copies_by_stage(pipelines[name]) if name in pipelines else [])
        for name, times in seconds.items()
    }
