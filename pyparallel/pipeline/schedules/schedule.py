"""The base class of schedules: the order of each rank's actions, and the weights they read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

from torch.optim import Optimizer

from ...training import FlatBuckets
from ..prediction.base import NoPrediction, Prediction, WeightPredictor
from ..prediction.corrections import Correction, DelayedOptimizer
from ..prediction.last_update import wrap_corrected
from .action import Action, Kind
from .shape import PipelineShape
from .versions import Live, Versions

# Options of a trainer that not every schedule can have, each with the end of the sentence: why not.
_NEED_A_FLUSH = {
    "gradient_accumulation_steps": "which does not flush",
    "grad_scaler": "whose stages update at different times, so that one that finds an infinity "
    "cannot have the others skip their updates",
}
_NEED_ONE_LOSS = {
    "max_norm": "whose stages learn from several losses",
    "skip connections": "whose stages learn from losses of their own",
    "tied weights": "whose stages learn from losses of their own",
    "sharded_state_dict": "whose heads are no part of the model",
}


class Schedule(ABC):
    """Pure functions from a pipeline's shape to the actions of each rank, which the executor runs.

    ``step`` yields a rank's actions in one step, ``drain`` those that remain after the last one.
    Steps, microbatches and updates are counted from the last time the pipeline was empty.

    Attributes:
        flushes: a step ends with the pipeline empty, and all stages update at its end.
        delays: gradients are applied to newer weights than those that their forwards have read.
            Of a schedule that neither flushes nor delays, the stages have losses of their own.
        needs_batch: the stages can be built only with the first batch.
        interleaves: it is for several stages on each rank.
        synchronous_updates: how many updates of a run come first whose gradients are not delayed.
    """

    flushes = False
    delays = False
    needs_batch = False
    interleaves = False
    synchronous_updates: int | Literal["warm-up"] = 0
    prediction: Prediction = NoPrediction()

    def error_at(self, shape: PipelineShape) -> str | None:
        """Return why this schedule cannot run on this shape, or None if it can."""
        return None

    @abstractmethod
    def step(self, shape: PipelineShape, rank: int, index: int) -> Iterable[Action]:
        """Return the actions of ``rank`` in step number ``index``."""

    def drain(self, shape: PipelineShape, rank: int, steps: int) -> Iterable[Action]:
        """Return the actions of ``rank`` that empty the pipeline after ``steps`` steps."""
        return ()

    @abstractmethod
    def update_index(self, shape: PipelineShape, microbatch: int) -> int:
        """Return the index of the update of a stage that applies this microbatch's gradient."""

    @abstractmethod
    def versions(self, shape: PipelineShape) -> Versions:
        """Return the policy of which weights each action reads."""

    def after(self, updates: int) -> "Schedule":
        """Return the schedule of a pipeline that was emptied after so many updates of the run."""
        return self

    def with_warm_up(self, find_updates: Callable[[], int]) -> "Schedule":
        """Return the schedule of a run whose learning rate rises in so many updates.

        ``find_updates`` raises a ValueError if it does not; it is called only if that matters.
        """
        return self

    def microbatches_per_update(self, shape: PipelineShape) -> int:
        """Return the number of microbatches whose gradients go into one update."""
        return shape.num_microbatches

    def delay(self, shape: PipelineShape, stage: int) -> int:
        """Return by how many updates a stage's gradients are delayed once the pipeline is full."""
        return 0

    def weight_predictor(
        self,
        shape: PipelineShape,
        stage: int,
        optimizer: Optimizer,
        weights: Sequence[FlatBuckets],
        correction: Correction | None = None,
    ) -> WeightPredictor:
        """Return the object that steps a stage's optimizer and, if needed, predicts its weights.

        ``weights`` has one entry for each parameter group; ``correction`` is of steps on stages
        whose gradients are delayed. A ValueError: the steps cannot be predicted, or not corrected.
        """
        predictor, delay = self.prediction.attach(optimizer, weights), self.delay(shape, stage)
        if correction is None or not delay:
            return predictor
        delayed = DelayedOptimizer(optimizer, weights, delay, shape.num_stages)
        return wrap_corrected(correction, predictor, delayed)

    def rank_actions(self, shape: PipelineShape, rank: int, steps: int = 1) -> Iterator[Action]:
        """Yield the actions of ``rank`` in ``steps`` steps, and those that empty the pipeline."""
        return chain(
            chain.from_iterable(self.step(shape, rank, index) for index in range(steps)),
            self.drain(shape, rank, steps),
        )

    def actions(
        self, num_stages: int, num_microbatches: int, num_ranks: int | None = None, steps: int = 1
    ) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of all ranks, from an empty pipeline to an empty pipeline.

        ``num_microbatches`` are of one of ``steps``; ``num_ranks`` None: one for each stage. Sizes
        that make no ``PipelineShape`` are a ValueError.
        """
        shape = PipelineShape(
            num_stages, num_microbatches, num_stages if num_ranks is None else num_ranks
        )
        ranks = range(shape.num_ranks)
        return tuple(tuple(self.rank_actions(shape, rank, steps)) for rank in ranks)


class Flushing(Schedule):
    """A schedule that flushes the pipeline in each step, and then updates each stage once."""

    flushes = True

    @abstractmethod
    def order(self, shape: PipelineShape, rank: int) -> Iterable[tuple[int, Kind, int]]:
        """Yield stage, kind and microbatch of the computations of ``rank`` in the first step."""

    def step(self, shape: PipelineShape, rank: int, index: int) -> Iterator[Action]:
        """Yield the same order in each step, then one update per stage."""
        first = index * shape.num_microbatches
        for stage, kind, microbatch in self.order(shape, rank):
            yield Action(stage, kind, first + microbatch)
        for stage in shape.stages(rank):
            yield Action(stage, Kind.UPDATE, first + shape.num_microbatches - 1)

    def update_index(self, shape: PipelineShape, microbatch: int) -> int:
        """Return the step of the microbatch: there is one update per step."""
        return microbatch // shape.num_microbatches

    def versions(self, shape: PipelineShape) -> Versions:
        """Return live weights: no update falls between a forward and its backward."""
        return Live()


def find_option_error(schedule: Schedule, option: str) -> str | None:
    """Return why a trainer cannot have an option with a schedule, or None if it can.

    That is the rest of a sentence whose subject is the schedule, as "which does not flush". An
    option is "correction", "grad_scaler", "gradient_accumulation_steps", "max_norm",
    "sharded_state_dict", "skip connections" or "tied weights".
    """
    if option == "correction":
        return None if schedule.delays else "whose gradients are not delayed"
    if option in _NEED_A_FLUSH:
        return None if schedule.flushes else _NEED_A_FLUSH[option]
    return None if schedule.flushes or schedule.delays else _NEED_ONE_LOSS[option]
