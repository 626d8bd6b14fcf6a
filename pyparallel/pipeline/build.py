"""Building the stages of a rank from its trainer's arguments."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, singledispatch

import torch
from torch import nn
from torch.optim import Optimizer

from ..comm import Collectives, Run
from ..optim import FusedOptimizer
from ..training.trainer import find_owner_error, raising_on_all_ranks
from .arguments import TrainerArguments
from .errors import agree
from .interlocking.build_heads import build_heads, check_trained_apart
from .interlocking.heads import as_heads
from .interlocking.runtime import InterlockingExecutor, find_shared_weight
from .interlocking.schedule import Interlocking
from .interlocking.stage import HeadRuntime, InterlockingStage
from .messages import P2PGroups
from .messages.codec import Codec
from .messages.stage_p2p import StageP2P
from .partition.auto import split_automatically
from .partition.names import names_of_modules
from .partition.slice import find_ties, slice_layers
from .partition.tied_parameters import TiedParameters
from .prediction.last_update import LastUpdate
from .replicas import GradientAverage, Replicas
from .runtime import build_stage
from .runtime.clipping import LossScale, device_for
from .runtime.executor import Executor
from .runtime.generators import StageGenerators
from .runtime.loss import Criterion, shares_update_fn
from .runtime.microbatches import MicrobatchSplitter
from .runtime.options import StageOptions
from .runtime.replicated_predictor import ReplicatedPredictor
from .runtime.stage import Stage
from .runtime.stage_layers import StageLayers
from .runtime.stage_weights import LiveWeights
from .schedules.schedule import Schedule
from .validation import check_memory, check_scalable, check_skips


@dataclass(frozen=True)
class BuiltStages:
    """The stages of a rank, and what they share with those of the other ranks."""

    split: tuple[int, ...]
    executor: Executor
    p2p: StageP2P
    criterion: Criterion
    tied: TiedParameters
    options: StageOptions
    gradients: GradientAverage | None  # over replicas


@dataclass(frozen=True)
class PreparedStages:
    """The stages of a rank, up to what all ranks decide by their optimizers."""

    optimizers: list[Optimizer]
    finish: Callable[[Criterion, StageOptions], Executor]
    replicas: Sequence[ReplicatedPredictor] = ()

    @classmethod
    def of(
        cls,
        prepared: Iterable[build_stage.TrainedStage],
        finish: Callable[[Criterion, StageOptions], Executor],
    ) -> "PreparedStages":
        """Return the stages of a rank, which are finished later."""
        prepared = list(prepared)
        optimizers = [optimizer for each in prepared for optimizer in each.optimizers]
        return cls(optimizers, finish, [e.replicated for e in prepared if e.replicated is not None])


def build_stages(
    arguments: TrainerArguments,
    splitter: MicrobatchSplitter | None,
    run: Run,
    replicas: Replicas | None,
) -> BuiltStages:
    """Build the stages of a rank; all ranks call it together, and fail together by a ValueError.

    ``splitter`` has the first batch; None where neither the schedule nor the split needs it.
    """
    split = _find_split(arguments, splitter, run)
    if replicas is not None and arguments.split is None:
        split = replicas.agree_on_split(split)
    shape, rank, schedule = arguments.shape, arguments.rank, arguments.schedule
    scaler, loss_scale = arguments.grad_scaler, None
    if scaler is not None and scaler.is_enabled():
        loss_scale = LossScale(scaler, run)
    of_all = run if replicas is None else replicas.run
    with raising_on_all_ranks(partial(agree, of_all)) as fields:
        modules = slice_layers(
            arguments.layers, split, ties_travel=schedule.delays, own=shape.stages(rank),
            names=names_of_modules(arguments.model, arguments.layers),
        )  # fmt: skip
        ties = find_ties(modules)
        fields.append(("tied weights", repr([str(tie) for tie in ties])))
        check_skips(schedule, modules, ties, arguments.compressors)
        local = [modules[stage] for stage in shape.stages(rank)]
        check_memory(local)
    device = next((p.device for module in local for p in module.parameters()), None)
    if device is None:
        device = device_for([], run) if shape.num_ranks > 1 else torch.device("cpu")
    groups = None
    if shape.num_ranks > 1:
        is_ring = shape.num_stages > shape.num_ranks
        groups = P2PGroups.connect(run, device, is_ring=is_ring)
    compressors = arguments.compressors.values()
    codecs = (None if compressor is None else Codec(compressor, rank) for compressor in compressors)
    p2p = StageP2P(shape, groups, *codecs)
    tied = TiedParameters(ties, shape, rank, run)
    tied.copy_from_owners()  # the ranks may have initialized the model differently
    with raising_on_all_ranks(partial(agree, of_all)):
        prepared = prepare_stages(schedule, arguments, modules, p2p, splitter)
        if (error := find_owner_error(prepared.optimizers)) is not None:
            raise ValueError(error)
        if loss_scale is not None:
            check_scalable(prepared.optimizers)
    gradients = None
    if replicas is not None:
        frozen = [module for module in local if not build_stage.trained_parameters(module)]
        gradients = replicas.start(prepared.replicas, frozen)
    options = StageOptions(
        loss_scale=loss_scale,
        steps_per_update=arguments.gradient_accumulation_steps,
        weighs_update=arguments.loss_weight_fn is not None
        and (gradients is not None or arguments.gradient_accumulation_steps > 1),
        max_norm=arguments.max_norm if schedule.delays else None,
        microbatches_per_update=schedule.microbatches_per_update(shape),
        measures_gradients=arguments.measure_gradient_norms,
    )
    if waits_for_gpu(groups, device):
        on_device = schedule.delays and _can_skip_on_device(arguments, prepared, run)
        defers_check = schedule.flushes or on_device
        options = replace(options, defers_check=defers_check, sends_found_inf=on_device)
    copies = [] if schedule.delays else [tie.parameter for tie in ties]
    criterion = Criterion(
        arguments.loss_fn,
        shares_update_fn(schedule, shape),
        options,
        partial(_is_trained, prepared.optimizers, copies),
    )
    executor = prepared.finish(criterion, options)
    return BuiltStages(split, executor, p2p, criterion, tied, options, gradients)


def _is_trained(
    optimizers: Iterable[Optimizer], copies: Iterable[nn.Parameter], parameter: nn.Parameter
) -> bool:
    """Return whether optimizers, or the owner of tied ``copies``, train a parameter."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    held = (each for group in groups for each in group["params"])
    return any(each is parameter for each in (*held, *copies))


def _find_split(
    arguments: TrainerArguments, splitter: MicrobatchSplitter | None, run: Run
) -> tuple[int, ...]:
    if splitter is not None:
        problem = splitter.find_input_error() if arguments.rank == 0 else None
        if arguments.schedule.needs_batch:
            problem = problem or splitter.find_target_error()
        agree(run, [], problem)
    if arguments.split is not None:
        return tuple(arguments.split)
    assert splitter is not None, "the trainer passes a batch if there is no split"
    example = splitter.inputs(0) if arguments.rank == 0 else None
    return split_automatically(arguments.layers, example, arguments.num_stages, run)


def waits_for_gpu(groups: P2PGroups | None, device: torch.device) -> bool:
    """Return whether the host waits for a GPU when it reads a loss; the same on all ranks."""
    return groups.headers is not None if groups else device.type != "cpu"


def _can_skip_on_device(arguments: TrainerArguments, prepared: PreparedStages, run: Run) -> bool:
    can = all(map(_skips_on_device, prepared.optimizers))
    # Both would take a skipped update for one of 0.
    repeats_updates = isinstance(arguments.schedule.prediction, LastUpdate)
    can = can and arguments.correction is None and not repeats_updates
    own = torch.tensor([int(can)], device=device_for([], run))
    return bool(Collectives(run).all_gather(own).all())


def _skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether a GPU's ``found_inf`` skips an optimizer's step without a wait of the host."""
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.skips_on_device
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return is_adam and all(group["fused"] for group in optimizer.param_groups)


@singledispatch
def prepare_stages(
    schedule: Schedule,
    arguments: TrainerArguments,
    modules: Sequence[StageLayers],
    p2p: StageP2P,
    splitter: MicrobatchSplitter | None,
) -> PreparedStages:
    """Prepare the stages of a rank: all that may fail on one rank alone."""
    shape, last = arguments.shape, arguments.num_stages - 1
    prepared = {
        index: build_stage.prepare_training(
            index, modules[index], arguments.optimizer_fn, schedule, shape,
            arguments.scheduler_fn, arguments.correction,
            has_replicas=arguments.replicas is not None,
        )
        for index in shape.stages(arguments.rank)
    }  # fmt: skip

    def finish(criterion: Criterion, options: StageOptions) -> Executor:
        stages = {
            index: Stage(
                index, modules[index], each.optimizers, each.weights,
                criterion if index == last else None, options, each.schedulers, each.replicated,
            )
            for index, each in prepared.items()
        }  # fmt: skip
        own = [modules[index] for index in prepared]
        generators = StageGenerators(arguments.seed, arguments.replica, own)
        return Executor(stages, shape, p2p, arguments.rank, generators, arguments.place)

    return PreparedStages.of(prepared.values(), finish)


@prepare_stages.register
def _prepare_interlocking(
    schedule: Interlocking,
    arguments: TrainerArguments,
    modules: Sequence[StageLayers],
    p2p: StageP2P,
    splitter: MicrobatchSplitter | None,
) -> PreparedStages:
    assert splitter is not None, "the trainer passes a batch if schedule.needs_batch"
    shape = arguments.shape
    heads = as_heads(schedule.heads, shape.num_stages)
    own = {index: modules[index] for index in shape.stages(arguments.rank)}
    head_loss_fn = schedule.head_loss_fn or arguments.loss_fn
    built = build_heads(own, dict(enumerate(heads)), head_loss_fn, shape, splitter, p2p)
    shared = find_shared_weight(heads, modules)
    check_trained_apart(built, modules)
    prepared = {}
    for index, module in own.items():
        named = build_stage.trained_parameters(module)
        if index in built:
            named |= build_stage.trained_parameters(built[index], "head.")
        optimizers, weights, replica = [], LiveWeights(None), None
        if named:
            optimizers = build_stage.build_optimizers(named, arguments.optimizer_fn)
            flat, predictor = build_stage.attach_predictors(optimizers, schedule, shape, index)
            if arguments.replicas is not None:
                both = nn.ModuleList([module, *([built[index]] if index in built else [])])
                replica = predictor = ReplicatedPredictor(predictor, both, optimizers, flat)
            weights = LiveWeights(predictor)
        schedulers = build_stage.build_schedulers(optimizers, arguments.scheduler_fn)
        prepared[index] = build_stage.TrainedStage(optimizers, weights, schedulers, replica)

    def finish(criterion: Criterion, options: StageOptions) -> Executor:
        stages = {}
        for index, each in prepared.items():
            head = None
            if index in built:
                head_criterion = criterion.with_loss_fn(schedule.head_loss_fn)
                reads_shared = heads[index].shared is not None
                head = HeadRuntime(built[index], head_criterion, reads_shared)
            stages[index] = InterlockingStage(
                index, own[index], each.optimizers, each.weights,
                None if head else criterion, head, options, each.schedulers, each.replicated,
            )  # fmt: skip
        ahead = schedule.max_ahead * shape.num_microbatches
        generators = StageGenerators(arguments.seed, arguments.replica, own.values())
        return InterlockingExecutor(
            stages, shape, p2p, arguments.rank, generators, schedule.reach(shape), ahead, shared
        )

    return PreparedStages.of(prepared.values(), finish)
