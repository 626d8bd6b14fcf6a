"""How the stages of a rank are built, and what does their actions: as the schedule needs it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from ..comm import FlatBuckets, Value
from .interlocking.build_heads import build_heads
from .interlocking.heads import Head, as_heads
from .interlocking.runtime import InterlockingRuntime, Shared
from .interlocking.schedule import Interlocking
from .interlocking.stage import HeadRuntime, InterlockingStage
from .runtime.executor import Log, train
from .runtime.loss import Criterion, Loss
from .runtime.microbatches import MicrobatchSplitter
from .runtime.p2p import Endpoint, StageP2P, sent_after
from .runtime.stage import OptimizerFactory, Stage, build_stage
from .runtime.stage_weights import LiveWeights, Weights
from .schedules.action import Action
from .schedules.schedule import Schedule
from .schedules.shape import PipelineShape


class Training(Protocol):
    """What does the actions of a call."""

    def __call__(
        self, stage: Stage, action: Action, needed: Value | None, feed: MicrobatchSplitter, log: Log
    ) -> Value | None:
        """What an action does, and what it makes for another stage."""

    def sent(self, action: Action) -> Iterable[Endpoint]:
        """Where what follows from an action goes."""

    def restart(self) -> None:
        """The pipe is empty: microbatches are counted from 0 again."""


class PlainTraining:
    """Every action as it stands."""

    def __call__(
        self, stage: Stage, action: Action, needed: Value | None, feed: MicrobatchSplitter, log: Log
    ) -> Value | None:
        """As ``train``."""
        return train(stage, action, needed, feed, log)

    def sent(self, action: Action) -> Iterable[Endpoint]:
        """To the next stage, or the one before."""
        return sent_after(action)

    def restart(self) -> None:
        """Nothing is remembered."""


@dataclass(frozen=True)
class Plan:
    """What the stages of any rank are made of.

    Args:
        layout: which stage is where.
        loss_fn: of outputs and targets.
        optimizer_fn: makes the optimizer of a stage from the list of its parameters.
        criterion: of the last stage.
    """

    layout: PipelineShape
    loss_fn: Loss
    optimizer_fn: OptimizerFactory
    criterion: Criterion

    def criterion_of(self, stage: int) -> Criterion | None:
        """The loss of a stage's outputs; None but for the last."""
        return self.criterion if stage == self.layout.num_stages - 1 else None


class Assembly(Protocol):
    """Builds a rank's part of the pipe."""

    @property
    def needs_batch(self) -> bool:
        """Whether stages are built for the first batch."""

    def build(
        self,
        modules: Sequence[nn.Module],
        mine: Iterable[int],
        mail: StageP2P,
        feed: MicrobatchSplitter | None,
    ) -> dict[int, Stage]:
        """The stages of a rank. All ranks must call this; one may fail alone.

        Args:
            modules: of all stages.
            mine: this rank's stages.
            mail: between stages.
            feed: the first batch; None: it is not needed.
        """

    def training(self, stages: Mapping[int, Stage], mail: StageP2P) -> Training:
        """What does their actions."""


class PlainAssembly:
    """For schedules whose gradients come from the one loss at the end."""

    needs_batch = False

    def __init__(self, schedule: Schedule, plan: Plan) -> None:
        self._schedule = schedule
        self._plan = plan

    def build(
        self,
        modules: Sequence[nn.Module],
        mine: Iterable[int],
        mail: StageP2P,
        feed: MicrobatchSplitter | None,
    ) -> dict[int, Stage]:
        """As ``Assembly.build``."""
        plan = self._plan
        return {
            index: build_stage(
                index,
                modules[index],
                plan.optimizer_fn,
                self._schedule,
                plan.layout,
                plan.criterion_of(index),
            )
            for index in mine
        }

    def training(self, stages: Mapping[int, Stage], mail: StageP2P) -> Training:
        """As ``Assembly.training``."""
        return PlainTraining()


class InterlockedAssembly:
    """For ``Interlocking``: stages with heads, which are built for what the stages hand on."""

    needs_batch = True

    def __init__(self, schedule: Interlocking, plan: Plan) -> None:
        self._schedule = schedule
        self._plan = plan
        self._heads: tuple[Head, ...] = as_heads(schedule.heads, plan.layout.num_stages)
        self._shared: Shared | None = None

    def build(
        self,
        modules: Sequence[nn.Module],
        mine: Iterable[int],
        mail: StageP2P,
        feed: MicrobatchSplitter | None,
    ) -> dict[int, Stage]:
        """As ``Assembly.build``.

        Raises:
            ValueError: a head fits neither its stage nor the loss, or is part of a stage.
        """
        assert feed is not None, "the trainer has a batch where one is needed"
        plan = self._plan
        held = {index: modules[index] for index in mine}
        heads = dict(enumerate(self._heads))
        loss_fn = self._schedule.head_loss_fn or plan.loss_fn
        fitting = build_heads(held, heads, loss_fn, plan.layout, feed, mail)
        if fitting.problem is not None:
            raise ValueError(fitting.problem) from fitting.cause
        self._shared = _find_shared(self._heads, modules)
        _check_apart(fitting.heads, modules)
        return {index: self._stage(index, held[index], fitting.heads.get(index)) for index in held}

    def training(self, stages: Mapping[int, Stage], mail: StageP2P) -> Training:
        """As ``Assembly.training``."""
        ours = {
            index: each for index, each in stages.items() if isinstance(each, InterlockingStage)
        }
        layout, schedule = self._plan.layout, self._schedule
        most = schedule.max_ahead * layout.num_microbatches
        return InterlockingRuntime(ours, mail, layout, schedule.reach(layout), most, self._shared)

    def _stage(self, index: int, module: nn.Module, head: nn.Module | None) -> InterlockingStage:
        plan = self._plan
        both = [module] if head is None else [module, head]
        parameters = [p for each in both for p in each.parameters() if p.requires_grad]
        optimizer = plan.optimizer_fn(parameters) if parameters else None
        weights: Weights = LiveWeights(None)
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)  # what a broken pipe may have left
            flat = [FlatBuckets(group["params"], 1 << 62) for group in optimizer.param_groups]
            weights = LiveWeights(self._schedule.prediction.attach(optimizer, flat))
        at_work = None
        if head is not None:
            criterion = plan.criterion.another(self._schedule.head_loss_fn)
            at_work = HeadRuntime(head, criterion, self._heads[index].shared is not None)
        return InterlockingStage(
            index, module, optimizer, weights, plan.criterion_of(index), at_work
        )


def assembly_of(schedule: Schedule, plan: Plan) -> Assembly:
    """The one that a schedule needs."""
    if isinstance(schedule, Interlocking):
        return InterlockedAssembly(schedule, plan)
    return PlainAssembly(schedule, plan)


def _check_apart(heads: Mapping[int, nn.Module], modules: Sequence[nn.Module]) -> None:
    """Check that heads train nothing that a stage trains.

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


def _find_shared(heads: Sequence[Head], modules: Sequence[nn.Module]) -> Shared | None:
    """The one weight that heads read.

    Raises:
        ValueError: they read several, or one that is of no stage before them.
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
    return Shared(weight, homes[0], last)
