"""Building a stage: its optimizers, their predictors, and the versions of its weights."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...optim import FusedOptimizer
from ...training import FlatBuckets, has_methods, wrong_type
from ...training.averager import as_optimizers
from ..prediction.base import JoinedPredictor, WeightPredictor
from ..prediction.corrections import Correction
from ..schedules.schedule import Schedule
from ..schedules.shape import PipelineShape
from .replicated_predictor import ReplicatedPredictor
from .stage import SchedulerFactory
from .stage_layers import StageLayers, owned_parameters
from .stage_weights import LiveWeights, StageWeights, Weights

_LONGEST_WARM_UP = 10**5  # updates

Optimizers = Optimizer | Sequence[Optimizer]
OptimizerFactory = (
    Callable[[list[nn.Parameter]], Optimizers]
    | Callable[[list[nn.Parameter], list[str]], Optimizers]
)


class TrainedStage(NamedTuple):
    """What trains a stage: optimizers, the weights that they step, and their schedulers."""

    optimizers: list[Optimizer]
    weights: Weights
    schedulers: list[LRScheduler]
    replicated: ReplicatedPredictor | None = None  # which also steps the optimizers


def prepare_training(
    stage: int,
    module: StageLayers,
    optimizer_fn: OptimizerFactory,
    schedule: Schedule,
    shape: PipelineShape,
    scheduler_fn: SchedulerFactory | None = None,
    correction: Correction | None = None,
    *,
    has_replicas: bool = False,
) -> TrainedStage:
    """Build a stage's optimizers, and weights in the versions that the schedule reads."""
    named = trained_parameters(module)
    if not named:
        return TrainedStage([], LiveWeights(None), [])
    optimizers = build_optimizers(named, optimizer_fn)
    if schedule.delay(shape, stage) and not schedule.synchronous_updates:
        _warn_of_delayed_attention(module, optimizers)
    flat, predictor = attach_predictors(optimizers, schedule, shape, stage, correction)
    replica = None
    if has_replicas:
        replica = predictor = ReplicatedPredictor(predictor, module, optimizers, flat)
    weights: Weights = LiveWeights(predictor)
    if not schedule.flushes:
        # A round with other replicas, and a scheduler's step, come after the pass of an update.
        can = scheduler_fn is None and not has_replicas
        can = can and all(isinstance(optimizer, FusedOptimizer) for optimizer in optimizers)
        weights = StageWeights(
            flat, predictor, schedule.versions(shape), stage,
            lambda microbatch: schedule.update_index(shape, microbatch),
            in_update=optimizers if can else (),
        )  # fmt: skip
    return TrainedStage(optimizers, weights, build_schedulers(optimizers, scheduler_fn), replica)


def _warn_of_delayed_attention(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Warn if Adam or AdamW steps the matrices of attention on gradients that are delayed."""
    adams = [optimizer for optimizer in optimizers if "Adam" in type(optimizer).__name__]
    groups = (group for optimizer in adams for group in optimizer.param_groups)
    matrices = {id(p) for group in groups for p in group["params"] if p.dim() > 1}
    for each in module.modules():
        is_attention = "attention" in type(each).__name__.lower()
        if is_attention and not matrices.isdisjoint(map(id, each.parameters())):
            warnings.warn(
                f"{type(each).__name__} is trained by {type(adams[0]).__name__} on delayed "
                "gradients from the first update, after which a GPT-2 has ended 12.6 % above its "
                "loss: pass synchronous_updates=100 to the schedule and max_norm=1.0 to the "
                'trainer, or train matrices by Muon (see "Choose a schedule" in the how-to guides)',
                stacklevel=2,
            )
            return


def build_schedulers(
    optimizers: Sequence[Optimizer], scheduler_fn: SchedulerFactory | None
) -> list[LRScheduler]:
    """Build the learning-rate scheduler of each optimizer; none without a function.

    One whose ``step`` cannot be called without arguments is a ValueError.
    """
    methods = "step", "state_dict", "load_state_dict"
    schedulers = [] if scheduler_fn is None else [scheduler_fn(each) for each in optimizers]
    for each in schedulers:
        if not has_methods(each, *methods):
            rule = "a function that returns a learning-rate scheduler such as StepLR"
            raise wrong_type("scheduler_fn", f"{rule}, with {', '.join(methods)}", each)
        needed = _required(each.step)
        if needed:
            raise ValueError(
                "scheduler_fn must return a scheduler whose step() needs nothing, as it follows "
                f"each update of a stage, got {type(each).__name__}, whose step needs {needed[0]}: "
                "leave scheduler_fn out, build one for each optimizer of trainer.stages, and step "
                "them in your loop, with the same values on all ranks"
            )
    return schedulers


def find_warm_up(scheduler_fn: SchedulerFactory | None) -> int:
    """Return after how many updates the learning rate first stops rising, or raise a ValueError."""
    rule = 'synchronous_updates must be a number, not "warm-up",'
    if scheduler_fn is None:
        raise ValueError(f"{rule} without a scheduler_fn")
    optimizer = SGD([nn.Parameter(torch.zeros(1, device="cpu"))], lr=1.0, momentum=0.9)
    try:
        scheduler = scheduler_fn(optimizer)
        rates = [optimizer.param_groups[0]["lr"]]
        while len(rates) < 2 or (rates[-2] < rates[-1] and len(rates) < _LONGEST_WARM_UP):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    except Exception as error:
        raise ValueError(f"{rule} with this scheduler_fn, got from it {error!r}") from error
    rises = len(rates) - 2
    if not 0 < rises < _LONGEST_WARM_UP - 2:
        raise ValueError(f"{rule} with a learning rate that rises in {rises} updates")
    return rises


def trained_parameters(module: nn.Module, prefix: str = "") -> dict[str, nn.Parameter]:
    """Return the parameters of a stage's module that are not frozen, by name in the model."""
    named = owned_parameters(module)
    return {prefix + name: each for name, each in named.items() if each.requires_grad}


def build_optimizers(
    named: Mapping[str, nn.Parameter], optimizer_fn: OptimizerFactory
) -> list[Optimizer]:
    """Build the optimizers of a stage's parameters by name, which train each once, and no other."""
    function: Any = optimizer_fn
    names = [list(named)] if _requires_two(function) else []
    optimizers = as_optimizers(function(list(named.values()), *names))
    holders: dict[int, list[str]] = {id(parameter): [] for parameter in named.values()}
    for each in optimizers:
        if not isinstance(each, Optimizer):
            rule = "a function that returns a torch optimizer or a list of them"
            raise wrong_type("optimizer_fn", rule, each)
        for group in each.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in holders:
                    raise ValueError(
                        "optimizer_fn must return optimizers of the parameters that it is called "
                        "with, those of one stage, got another one of shape "
                        f"{list(parameter.shape)}: build them from its argument"
                    )
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


def _requires_two(function: Callable[..., Any]) -> bool:
    """Return whether a function has exactly two positional parameters without a default."""
    return len(_required(function)) == 2


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some that are not written in Python have no signature
        return []
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in parameters if p.kind in positional and p.default is p.empty]


def attach_predictors(
    optimizers: Sequence[Optimizer],
    schedule: Schedule,
    shape: PipelineShape,
    stage: int,
    correction: Correction | None = None,
) -> tuple[list[FlatBuckets], WeightPredictor]:
    """Return the flat buffers of a stage's parameter groups, and what steps and predicts them."""
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
