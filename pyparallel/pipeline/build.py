"""Building the stages of a rank and the runner of their actions, as the schedule needs them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from typing_extensions import override

from ..comm import FlatBuckets, Value
from .interlocking.build_heads import build_heads
from .interlocking.heads import Head, as_heads
from .interlocking.runtime import InterlockingRuntime, SharedWeight
from .interlocking.schedule import Interlocking
from .interlocking.stage import HeadRuntime, InterlockingStage
from .runtime.executor import Trace, train
from .runtime.loss import Criterion, Loss
from .runtime.microbatches import MicrobatchSplitter
from .runtime.p2p import Endpoint, StageP2P, destinations_of
from .runtime.stage import OptimizerFactory, Stage, build_stage
from .runtime.stage_weights import LiveWeights, Weights
from .schedules.action import Action
from .schedules.schedule import Schedule
from .schedules.shape import PipelineShape


class TrainingRunner(Protocol):
    """Runs the actions of training."""

    def __call__(
        self,
        stage: Stage,
        action: Action,
        inputs: Value | None,
        splitter: MicrobatchSplitter,
        trace: Trace,
    ) -> Value | None:
        """Run an action and return its output for another stage."""

    def destinations(self, action: Action) -> Iterable[Endpoint]:
        """Return where the messages of an action are sent."""

    def restart(self) -> None:
        """Count microbatches from 0 again, with the pipeline empty."""


class PlainTrainingRunner(TrainingRunner):
    """Runs every action with ``train``."""

    @override
    def __call__(
        self,
        stage: Stage,
        action: Action,
        inputs: Value | None,
        splitter: MicrobatchSplitter,
        trace: Trace,
    ) -> Value | None:
        return train(stage, action, inputs, splitter, trace)

    @override
    def destinations(self, action: Action) -> Iterable[Endpoint]:
        return destinations_of(action)

    @override
    def restart(self) -> None:
        pass


@dataclass(frozen=True)
class StageSpec:
    """What the stages of every rank are built from.

    Args:
        shape: of the pipeline.
        loss_fn: of outputs and targets.
        optimizer_fn: builds the optimizer of a stage from the list of its parameters.
        criterion: of the last stage.
    """

    shape: PipelineShape
    loss_fn: Loss
    optimizer_fn: OptimizerFactory
    criterion: Criterion

    def criterion_of(self, stage: int) -> Criterion | None:
        """Return the loss of a stage's outputs; None for all but the last."""
        return self.criterion if stage == self.shape.num_stages - 1 else None


class StageBuilder(Protocol):
    """Builds a rank's part of the pipeline."""

    @property
    def needs_batch(self) -> bool:
        """Return whether building needs the first batch."""

    def build(
        self,
        modules: Sequence[nn.Module],
        local: Iterable[int],
        p2p: StageP2P,
        splitter: MicrobatchSplitter | None,
    ) -> dict[int, Stage]:
        """Build the stages of a rank. All ranks must call this; a single rank may raise.

        Args:
            modules: of all stages.
            local: this rank's stages.
            p2p: messages between stages.
            splitter: of the first batch; None where it is not needed.
        """

    def runner(self, stages: Mapping[int, Stage], p2p: StageP2P) -> TrainingRunner:
        """Return the runner of the stages' actions."""


class PlainStageBuilder(StageBuilder):
    """The builder for schedules whose gradients all come from the loss of the last stage."""

    needs_batch = False

    def __init__(self, schedule: Schedule, spec: StageSpec) -> None:
        self._schedule = schedule
        self._spec = spec

    @override
    def build(
        self,
        modules: Sequence[nn.Module],
        local: Iterable[int],
        p2p: StageP2P,
        splitter: MicrobatchSplitter | None,
    ) -> dict[int, Stage]:
        spec = self._spec
        return {
            index: build_stage(
                index,
                modules[index],
                spec.optimizer_fn,
                self._schedule,
                spec.shape,
                spec.criterion_of(index),
            )
            for index in local
        }

    @override
    def runner(self, stages: Mapping[int, Stage], p2p: StageP2P) -> TrainingRunner:
        return PlainTrainingRunner()


class InterlockingStageBuilder(StageBuilder):
    """The builder for ``Interlocking``: stages with heads, built for the stages' outputs."""

    needs_batch = True

    def __init__(self, schedule: Interlocking, spec: StageSpec) -> None:
        self._schedule = schedule
        self._spec = spec
        self._heads: tuple[Head, ...] = as_heads(schedule.heads, spec.shape.num_stages)
        self._shared: SharedWeight | None = None

    @override
    def build(
        self,
        modules: Sequence[nn.Module],
        local: Iterable[int],
        p2p: StageP2P,
        splitter: MicrobatchSplitter | None,
    ) -> dict[int, Stage]:
        """Build the stages of a rank with their heads.

        Raises:
            ValueError: a head does not fit its stage or the loss, or is part of a stage.
        """
        assert splitter is not None, "the trainer passes a batch if needs_batch"
        spec = self._spec
        own = {index: modules[index] for index in local}
        heads = dict(enumerate(self._heads))
        loss_fn = self._schedule.head_loss_fn or spec.loss_fn
        built = build_heads(own, heads, loss_fn, spec.shape, splitter, p2p)
        if built.problem is not None:
            raise ValueError(built.problem) from built.cause
        self._shared = _find_shared_weight(self._heads, modules)
        _check_no_shared_training(built.heads, modules)
        return {index: self._stage(index, own[index], built.heads.get(index)) for index in own}

    @override
    def runner(self, stages: Mapping[int, Stage], p2p: StageP2P) -> TrainingRunner:
        interlocking = {
            index: each for index, each in stages.items() if isinstance(each, InterlockingStage)
        }
        shape, schedule = self._spec.shape, self._schedule
        return InterlockingRuntime(
            interlocking,
            p2p,
            shape,
            schedule.reach(shape),
            schedule.max_ahead * shape.num_microbatches,
            self._shared,
        )

    def _stage(self, index: int, module: nn.Module, head: nn.Module | None) -> InterlockingStage:
        spec = self._spec
        trained = [module] if head is None else [module, head]
        parameters = [p for each in trained for p in each.parameters() if p.requires_grad]
        optimizer = spec.optimizer_fn(parameters) if parameters else None
        weights: Weights = LiveWeights(None)
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)  # gradients that a failed pipeline may have left
            flat = [FlatBuckets(group["params"], 1 << 62) for group in optimizer.param_groups]
            weights = LiveWeights(self._schedule.prediction.attach(optimizer, flat))
        head_runtime = None
        if head is not None:
            criterion = spec.criterion.with_loss_fn(self._schedule.head_loss_fn)
            head_runtime = HeadRuntime(head, criterion, self._heads[index].shared is not None)
        return InterlockingStage(
            index, module, optimizer, weights, spec.criterion_of(index), head_runtime
        )


def stage_builder_for(schedule: Schedule, spec: StageSpec) -> StageBuilder:
    """Return the builder that a schedule needs."""
    if isinstance(schedule, Interlocking):
        return InterlockingStageBuilder(schedule, spec)
    return PlainStageBuilder(schedule, spec)


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
