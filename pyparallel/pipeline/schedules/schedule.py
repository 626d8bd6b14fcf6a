"""A schedule: in which order every rank works (here), and on which weights (``versions``)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from torch.optim import Optimizer

from ...comm import FlatBuckets
from ..prediction.base import NoPrediction, Prediction, WeightPredictor
from .action import Action, Kind
from .shape import PipelineShape
from .versions import Versions


class Schedule(ABC):
    """Pure functions from a layout to every rank's actions; the executor runs them as they stand.

    A trainer calls the pipe again and again with ``num_microbatches`` each time. ``call`` is what a
    rank does in one such call, ``drain`` what it still owes after the last one; schedules that
    flush owe nothing. All numbers count from the last time the pipe was empty.
    """

    prediction: Prediction = NoPrediction()

    def validation_error(self, layout: PipelineShape) -> str | None:
        """Why this schedule cannot run on a layout, as a sentence; None: it can."""
        return None

    @abstractmethod
    def call(self, layout: PipelineShape, rank: int, index: int) -> Iterable[Action]:
        """What ``rank`` does in call number ``index``."""

    def drain(self, layout: PipelineShape, rank: int, calls: int) -> Iterable[Action]:
        """What ``rank`` does to empty the pipe after so many calls."""
        return ()

    @abstractmethod
    def update_index(self, layout: PipelineShape, microbatch: int) -> int:
        """How many updates of a stage come before the one that takes this microbatch's gradient."""

    @abstractmethod
    def versions(self, layout: PipelineShape) -> Versions:
        """Which weights each action reads: the policy that goes with this order."""

    def weight_predictor(
        self,
        layout: PipelineShape,
        stage: int,
        optimizer: Optimizer,
        weights: Sequence[FlatBuckets],
    ) -> WeightPredictor:
        """What steps the optimizer of a stage, and predicts its weights if this schedule does.

        Args:
            layout: of the pipeline.
            stage: the stage's index.
            optimizer: of its parameters.
            weights: one for each parameter group of the optimizer.

        Raises:
            ValueError: there is no rule of prediction for this optimizer.
        """
        return self.prediction.attach(optimizer, weights)

    def rank_actions(self, layout: PipelineShape, rank: int, calls: int = 1) -> Iterator[Action]:
        """All that ``rank`` does in so many calls, from an empty pipe to an empty pipe."""
        return chain(
            chain.from_iterable(self.call(layout, rank, index) for index in range(calls)),
            self.drain(layout, rank, calls),
        )

    def actions(
        self, num_stages: int, num_microbatches: int, num_ranks: int | None = None, calls: int = 1
    ) -> tuple[tuple[Action, ...], ...]:
        """The actions of every rank, from an empty pipe to an empty pipe.

        Args:
            num_stages: parts that the model is cut into.
            num_microbatches: microbatches of one call.
            num_ranks: processes; default one for each stage.
            calls: how many calls follow each other.

        Raises:
            ValueError: a size is not a positive integer, or the ranks do not divide the stages.
        """
        layout = PipelineShape(
            num_stages, num_microbatches, num_stages if num_ranks is None else num_ranks
        )
        ranks = range(layout.num_ranks)
        return tuple(tuple(self.rank_actions(layout, rank, calls)) for rank in ranks)


class Flushing(Schedule):
    """A schedule that empties the pipe in every call, and then updates every stage once."""

    @abstractmethod
    def order(self, layout: PipelineShape, rank: int) -> Iterable[tuple[int, Kind, int]]:
        """Stage, kind and microbatch of all that ``rank`` computes, in the first call."""

    def call(self, layout: PipelineShape, rank: int, index: int) -> Iterator[Action]:
        """The same order in every call, the microbatches counted on."""
        first = index * layout.num_microbatches
        for stage, kind, microbatch in self.order(layout, rank):
            yield Action(stage, kind, first + microbatch)
        for stage in layout.stages(rank):
            yield Action(stage, Kind.UPDATE, first + layout.num_microbatches - 1)

    def update_index(self, layout: PipelineShape, microbatch: int) -> int:
        """One update a call."""
        return microbatch // layout.num_microbatches
