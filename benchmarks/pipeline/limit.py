"""Systems beside the upper limit of their speed: all stages compute without waiting.

Where stages sleep the limit is simulated, and a stage alone shows what weight prediction costs.
"""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.harness.turns import slowest, take_turns, timed
from benchmarks.pipeline.models import NUM_BYTES, ByteModel, Model, SleepingModel, build_stages
from benchmarks.pipeline.systems import (
    ADAMW,
    Plan,
    System,
    copies_by_stage,
    make_optimizer,
    start,
    time_microbatches,
)
from pyparallel.pipeline import Action, PipelineShape, PipeOptim
from pyparallel.pipeline.runtime.build_stage import attach_predictors
from pyparallel.planning.pipelines import simulate


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
    """A system in which each rank trains its stage alone, with an update per microbatch."""

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
    """The measurements of one system."""

    seconds: list[float]  # per microbatch in each turn, on the slowest rank
    weight_copies: list[int]  # peak number of each stage; empty: not counted
    simulated: float = 0.0  # the seconds by the simulator, where stages sleep

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
    """Measure all systems in turns, and the limit with an optimizer of this class."""
    pipelines = start(systems, model, num_microbatches)
    limit = start([Limit(optimizer)], model, num_microbatches)
    seconds = time_microbatches(limit | pipelines, num_microbatches, plan)
    return {
        name: Speed(times, copies_by_stage(pipelines[name]) if name in pipelines else [])
        for name, times in seconds.items()
    }


def measure_bubbles(
    rank: int, model: SleepingModel, systems: Sequence[System], num_microbatches: int, plan: Plan
) -> dict[str, Speed]:
    """Measure all systems in turns, and simulate them."""
    trainings = start(systems, model, num_microbatches)
    seconds = time_microbatches(trainings, num_microbatches, plan)
    return {
        name: Speed(
            seconds[name],
            copies_by_stage(training),
            simulated_seconds(training.actions, model) / num_microbatches,
        )
        for name, training in trainings.items()
    }


def simulated_seconds(
    actions: Callable[[int], Sequence[Sequence[Action]]], model: SleepingModel
) -> float:
    """Return the simulated time of a step in steady state: what one more step adds."""
    few = 4  # more than the warm-up takes, with at least as many microbatches as stages
    fewer, more = actions(few), actions(few + 1)
    costs = model.costs(1 + max(action.stage for action in chain.from_iterable(fewer)))
    return simulate(more, costs).makespan - simulate(fewer, costs).makespan


PASSES = "forward and backward"
UPDATE, PREDICTING = "update", "update with prediction"
DIFFERENCE = "the prediction: the difference"


def adamw(stage: nn.Module) -> list[Optimizer]:
    return [make_optimizer(stage.parameters())]


def muon(stage: nn.Module) -> list[Optimizer]:
    """Return Muon for the matrices of the blocks, torch's fused AdamW for the rest."""
    matrices = [p for p in stage.parameters() if p.ndim == 2 and NUM_BYTES not in p.shape]
    chosen = set(map(id, matrices))
    rest = [parameter for parameter in stage.parameters() if id(parameter) not in chosen]
    return [torch.optim.Muon(matrices, lr=1e-4, weight_decay=0.01), make_optimizer(rest)]


OPTIMIZERS = {"AdamW": adamw, "Muon and AdamW": muon}


def measure_prediction(
    rank: int, model: ByteModel, microbatches: int, kind: str
) -> dict[str, list[float]]:
    """Return the seconds of each on the slowest rank, by microbatch; a quarter more warms up.

    Each update follows a forward and a backward, so that the caches are as in training.
    """
    alone = StageAlone(model)
    optimizers = OPTIMIZERS[kind](alone.stage)
    flat, predictor = attach_predictors(optimizers, PipeOptim(), PipelineShape(2, 1, 2), 0)
    out = [torch.empty_like(buffer) for buckets in flat for buffer in buckets.buffers]

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def after_passes(function: Callable[[], object]) -> tuple[float, float]:
        passes = timed(lambda: alone.backward(alone.forward()))
        return passes, timed(function)

    runs = {
        UPDATE: lambda: after_passes(update),
        PREDICTING: lambda: after_passes(lambda: predictor.step(1, out)),
    }
    found = take_turns(runs, microbatches, microbatches // 4, dist.barrier)
    seconds = {name: [own for _, own in pairs] for name, pairs in found.items()}
    passes = [passes for pairs in found.values() for passes, _ in pairs]
    warm = slowest({PASSES: passes, **seconds})
    differences = zip(warm[PREDICTING], warm[UPDATE], strict=True)
    return {**warm, DIFFERENCE: [predicting - update for predicting, update in differences]}
