"""Building the stages of a rank and their executor, as the schedule needs them."""

from collections.abc import Mapping, Sequence
from functools import singledispatch

from torch import nn

from .interlocking.build_heads import build_heads
from .interlocking.heads import Head, as_heads
from .interlocking.runtime import InterlockingExecutor, SharedWeight
from .interlocking.schedule import Interlocking
from .interlocking.stage import HeadRuntime, InterlockingStage
from .prediction.corrections import Correction
from .runtime.build_stage import (
    OptimizerFactory,
    attach_predictors,
    build_optimizers,
    build_stage,
    trained_parameters,
)
from .runtime.executor import Executor
from .runtime.loss import Criterion
from .runtime.microbatches import MicrobatchSplitter
from .runtime.p2p import StageP2P
from .runtime.stage_layers import StageLayers
from .runtime.stage_weights import LiveWeights
from .schedules.schedule import Schedule
from .schedules.shape import PipelineShape


@singledispatch
def build_executor(
    schedule: Schedule,
    modules: Sequence[StageLayers],
    shape: PipelineShape,
    rank: int,
    optimizer_fn: OptimizerFactory,
    criterion: Criterion,
    p2p: StageP2P,
    splitter: MicrobatchSplitter | None,
    correction: Correction | None,
) -> Executor:
    """Build the stages of a rank, and return their executor.

    All ranks must call this; a single rank may raise.

    Args:
        schedule: which actions run, and on which weights.
        modules: of all stages.
        shape: of the pipeline.
        rank: this one.
        optimizer_fn: builds the optimizers of a stage from the list of its parameters, or from
            that and the list of their names.
        criterion: of the last stage.
        p2p: messages between stages.
        splitter: of the first batch; None if the schedule does not need it.
        correction: of delayed gradients; None: none.

    Raises:
        TypeError: ``optimizer_fn`` returns anything but optimizers.
        ValueError: they do not hold each parameter once, or the schedule cannot predict their
            steps, or the correction not correct them.
    """
    last = shape.num_stages - 1
    stages = {
        index: build_stage(
            index,
            modules[index],
            optimizer_fn,
            schedule,
            shape,
            criterion if index == last else None,
            correction,
        )
        for index in shape.stages(rank)
    }
    return Executor(stages, shape, p2p, rank)


@build_executor.register
def _build_interlocking(
    schedule: Interlocking,
    modules: Sequence[StageLayers],
    shape: PipelineShape,
    rank: int,
    optimizer_fn: OptimizerFactory,
    criterion: Criterion,
    p2p: StageP2P,
    splitter: MicrobatchSplitter | None,
    correction: Correction | None,
) -> InterlockingExecutor:
    """Build the stages of a rank with their heads.

    Raises:
        ValueError: a head does not fit its stage or the loss, or is part of a stage.
    """
    assert splitter is not None, "the trainer passes a batch if schedule.needs_batch"
    heads = as_heads(schedule.heads, shape.num_stages)
    head_criterion = criterion.with_loss_fn(schedule.head_loss_fn)
    own = {index: modules[index] for index in shape.stages(rank)}
    built = build_heads(own, dict(enumerate(heads)), head_criterion.loss_fn, shape, splitter, p2p)
    if built.problem is not None:
        raise ValueError(built.problem) from built.cause
    shared = _find_shared_weight(heads, modules)
    _check_no_shared_training(built.heads, modules)
    stages = {}
    for index, module in own.items():
        head = None
        if index in built.heads:
            head = HeadRuntime(
                built.heads[index],
                criterion.with_loss_fn(schedule.head_loss_fn),
                heads[index].shared is not None,
            )
        trained = {"": module} if head is None else {"": module, "head.": head.module}
        named: dict[str, nn.Parameter] = {}
        for prefix, each in trained.items():
            named |= trained_parameters(each, prefix)
        optimizers, weights = [], LiveWeights(None)
        if named:
            optimizers = build_optimizers(named, optimizer_fn)
            weights = LiveWeights(attach_predictors(optimizers, schedule, shape, index)[1])
        own_criterion = criterion if head is None else None
        stages[index] = InterlockingStage(index, module, optimizers, weights, own_criterion, head)
    max_ahead = schedule.max_ahead * shape.num_microbatches
    return InterlockingExecutor(stages, shape, p2p, rank, schedule.reach(shape), max_ahead, shared)


def _check_no_shared_training(heads: Mapping[int, nn.Module], modules: Sequence[nn.Module]) -> None:
    """Check that heads train no parameters of the stages.

    Raises:
        ValueError: one does.
    """
    homes = {p: stage for stage, module in enumerate(modules) for p in module.parameters()}
    for stage, head in heads.items():
        for parameter in head.parameters():
            if parameter in homes and parameter.requires_grad:
                raise ValueError(
                    "heads must not hold parameters of the layers, as they learn from another "
                    f"loss, got one of stage {homes[parameter]} in the head of stage {stage}: "
                    "TiedHead(embedding) reads an embedding of theirs"
                )


def _find_shared_weight(heads: Sequence[Head], modules: Sequence[nn.Module]) -> SharedWeight | None:
    """Return the weight that heads share; None: they share none.

    Raises:
        ValueError: they share several, or one that is of no earlier stage.
    """
    readers = [(stage, head.shared) for stage, head in enumerate(heads) if head.shared is not None]
    if not readers:
        return None
    (first, weight), (last, _) = readers[0], readers[-1]
    if any(each is not weight for _, each in readers):
        raise ValueError("heads must share one embedding, got several")
    homes = [s for s, module in enumerate(modules) if any(p is weight for p in module.parameters())]
    if not homes or homes[0] > first:
        where = f"stage {homes[0]}" if homes else "no stage"
        raise ValueError(
            f"heads must share an embedding of their own or an earlier stage, got one of {where} "
            f"in the head of stage {first}"
        )
    return SharedWeight(weight, homes[0], last)
