"""Building a stage: its optimizers, their predictors, and the versions of its weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...comm import FlatBuckets, wrong_type
from ...optim import FusedOptimizer
from ..prediction.base import WeightPredictor
from ..prediction.corrections import Correction
from ..prediction.joined import JoinedPredictor
from ..schedules.schedule import Flushing, Schedule
from ..schedules.shape import PipelineShape
from .loss import Criterion
from .stage import Stage
from .stage_layers import StageLayers
from .stage_weights import LiveWeights, StageWeights, Weights

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]]


def build_stage(
    index: int,
    module: StageLayers,
    optimizer_fn: OptimizerFactory,
    schedule: Schedule,
    shape: PipelineShape,
    criterion: Criterion | None,
    correction: Correction | None = None,
) -> Stage:
    """Build a stage with its optimizers, and weights in the versions that the schedule reads.

    Raises:
        TypeError: ``optimizer_fn`` returns anything but optimizers.
        ValueError: they do not hold each parameter once, or the schedule cannot predict their
            steps, or the correction not correct them.
    """
    named = {name: each for name, each in module.owned_parameters() if each.requires_grad}
    if not named:
        return Stage(index, module, [], LiveWeights(None), criterion)
    optimizers = build_optimizers(named, optimizer_fn)
    flat, predictor = attach_predictors(optimizers, schedule, shape, index, correction)
    weights: Weights = LiveWeights(predictor)
    if not isinstance(schedule, Flushing):
        weights = StageWeights(
            flat,
            predictor,
            schedule.versions(shape),
            index,
            lambda microbatch: schedule.update_index(shape, microbatch),
        )
    return Stage(index, module, optimizers, weights, criterion)


def build_optimizers(
    named: Mapping[str, nn.Parameter], optimizer_fn: OptimizerFactory
) -> list[Optimizer]:
    """Build the optimizers of a stage's parameters.

    Raises:
        TypeError: ``optimizer_fn`` returns anything but optimizers.
        ValueError: they do not hold each parameter once.
    """
    returned: Any = optimizer_fn(list(named.values()))
    several = isinstance(returned, list | tuple)
    optimizers: list[Any] = list(returned) if several else [returned]
    holders: dict[int, list[str]] = {id(parameter): [] for parameter in named.values()}
    for each in optimizers:
        if not isinstance(each, Optimizer):
            rule = "a function that returns a torch optimizer or a list of them"
            raise wrong_type("optimizer_fn", rule, each)
        for group in each.param_groups:
            for parameter in group["params"]:
                holders.setdefault(id(parameter), []).append(type(each).__name__)
    for name, parameter in named.items():
        found = holders[id(parameter)]
        if len(found) != 1:
            fix = "; freeze it with requires_grad_(False) to train without it" if not found else ""
            raise ValueError(
                "optimizer_fn must return optimizers that hold each parameter once, got "
                f"{name} of shape {list(parameter.shape)} in {' and '.join(found) or 'none'}{fix}"
            )
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)  # gradients that a failed pipeline may have left
    return optimizers


def attach_predictors(
    optimizers: Sequence[Optimizer],
    schedule: Schedule,
    shape: PipelineShape,
    stage: int,
    correction: Correction | None = None,
) -> tuple[list[FlatBuckets], WeightPredictor]:
    """Return the flat buffers of all parameter groups of a stage, and what steps and predicts them.

    Raises:
        ValueError: the steps of an optimizer cannot be predicted or corrected.
    """
    flat: list[FlatBuckets] = []
    parts = []
    for optimizer in optimizers:
        if isinstance(optimizer, FusedOptimizer):
            optimizer.adopt()
            own = optimizer.lay_out()
        else:
            own = [FlatBuckets(group["params"], 1 << 62) for group in optimizer.param_groups]
        predictor = schedule.weight_predictor(shape, stage, optimizer, own, correction)
        flat += own
        parts.append((predictor, sum(len(each.buffers) for each in own)))
    return flat, parts[0][0] if len(parts) == 1 else JoinedPredictor(parts)
