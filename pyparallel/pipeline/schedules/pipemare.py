"""The PipeMare schedule: no stashed weights, but learning rates and backward weights corrected."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer
from typing_extensions import override

from ...training import FlatBuckets
from ...training.arguments import check_integer, require
from ..prediction.base import WeightPredictor
from ..prediction.corrections import Correction
from ..prediction.pipemare import DiscrepancyCorrected, LRRescheduled
from .shape import PipelineShape
from .streaming import Streaming
from .versions import Estimated, Live, Versions


@dataclass(frozen=True, repr=False)
class PipeMare(Streaming):
    """1F1B without flush, forward and backward on live weights (Yang et al., MLSys 2021).

    Keeps one copy of the weights, and has two corrections, each of them optional.

    Args:
        annealing: (T1) in the first ``annealing`` updates after the synchronous ones the learning
            rate of a stage is divided by its delay to the power of 1 - update / annealing. The
            delay is the number of updates between a microbatch's forward and its update,
            stages - 1 - stage. 0: learning rates are not changed.
        decay: (T2) the backward reads an estimate of the forward's weights, from an exponential
            moving average of the weights' changes; the weight of a change that is as old as the
            delay (D of the paper), in (0, 1). It takes two more copies. None: live weights.
    """

    annealing: int = 0
    decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("annealing", self.annealing, 0)
        fits = self.decay is None or 0 < self.decay < 1
        require(fits, "decay must be in (0, 1) or None", self.decay)

    @override
    def streaming_versions(self, shape: PipelineShape) -> Versions:
        return Live() if self.decay is None else Estimated()

    def rate_factor(self, shape: PipelineShape, stage: int, update: int) -> float:
        """Return the factor of a stage's learning rate in update number ``update``."""
        power = max(0.0, 1 - update / self.annealing) if self.annealing else 0.0
        return float(max(1, self.delay(shape, stage)) ** -power)

    def weight_predictor(
        self,
        shape: PipelineShape,
        stage: int,
        optimizer: Optimizer,
        weights: Sequence[FlatBuckets],
        correction: Correction | None = None,
    ) -> WeightPredictor:
        """Return a predictor that rescales learning rates and averages the weights' changes."""
        predictor = super().weight_predictor(shape, stage, optimizer, weights, correction)
        if self.decay is not None and self.delay(shape, stage):
            per_update = self.decay ** (1 / self.delay(shape, stage))
            predictor = DiscrepancyCorrected(predictor, optimizer, weights, per_update)
        if self.annealing:
            predictor = LRRescheduled(
                predictor, optimizer, lambda update: self.rate_factor(shape, stage, update)
            )
        return predictor
