"""The base class of schedules: the order of each rank's actions, and the weights they read."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from torch.optim import Optimizer

from ..._deprecated import renamed_arguments
from ...comm import FlatBuckets
from ..prediction.base import NoPrediction, Prediction, WeightPredictor
from ..prediction.corrections import Correction
from .action import Action, Kind
from .shape import PipelineShape
from .versions import Live, Versions


class Schedule(ABC):
    """Pure functions from a pipeline's shape to the actions of each rank, which the executor runs.

    Each ``PipelineTrainer.step`` runs ``num_microbatches``. ``step`` yields a rank's actions in one
    of them, ``drain`` those that remain after the last one; schedules that flush have none. Steps,
    microbatches and updates are counted from the last time the pipeline was empty.
    """

    prediction: Prediction = NoPrediction()
    needs_batch = False  # whether the stages can be built only with the first batch

    def validation_error(self, shape: PipelineShape) -> str | None:
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

        Args:
            shape: of the pipeline.
            stage: the stage's index.
            optimizer: of the stage's parameters.
            weights: one entry for each parameter group of the optimizer.
            correction: of the steps of stages whose gradients are delayed.

        Raises:
            ValueError: this optimizer's steps cannot be predicted, or not corrected.
        """
        predictor, delay = self.prediction.attach(optimizer, weights), self.delay(shape, stage)
        if correction is None or not delay:
            return predictor
        return correction.wrap(predictor, optimizer, weights, delay, shape.num_stages)

    @renamed_arguments(layout="shape", calls="steps")
    def rank_actions(self, shape: PipelineShape, rank: int, steps: int = 1) -> Iterator[Action]:
        """Yield the actions of ``rank`` in ``steps`` steps, and those that empty the pipeline."""
        return chain(
            chain.from_iterable(self.step(shape, rank, index) for index in range(steps)),
            self.drain(shape, rank, steps),
        )

    @renamed_arguments(calls="steps")
    def actions(
        self, num_stages: int, num_microbatches: int, num_ranks: int | None = None, steps: int = 1
    ) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of all ranks, from an empty pipeline to an empty pipeline.

        Args:
            num_stages: number of stages.
            num_microbatches: microbatches of one step.
            num_ranks: number of processes; None: one for each stage.
            steps: number of consecutive steps.

        Raises:
            ValueError: a size is not a positive integer, or ``num_stages`` is not a multiple of
                ``num_ranks``.
        """
        shape = PipelineShape(
            num_stages, num_microbatches, num_stages if num_ranks is None else num_ranks
        )
        ranks = range(shape.num_ranks)
        return tuple(tuple(self.rank_actions(shape, rank, steps)) for rank in ranks)


class Flushing(Schedule):
    """A schedule that flushes the pipeline in each step, and then updates each stage once."""

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
