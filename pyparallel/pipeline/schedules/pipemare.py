"""No versions at all, but rates and backward weights that make up for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from ...comm import FlatBuckets
from ..prediction.base import WeightPredictor
from ..prediction.discrepancy import DiscrepancyCorrected
from ..prediction.lr_rescheduling import LRRescheduled
from .shape import PipelineShape
from .streaming import Streaming
from .versions import Live, Recomputed, Versions


@dataclass(frozen=True)
class PipeMare(Streaming):
    """1F1B without flush on live weights, both ways (Yang et al., MLSys 2021).

    One copy of the weights, and two remedies, either of which may be left out.

    Args:
        annealing: the learning rate of a stage is divided by its delay to the power of
            1 - update / annealing, until after so many updates it is the whole (T1). The delay is
            the updates between the forward and the update of a microbatch, stages - 1 - stage.
            0: learning rates stand as they are.
        decay: the backward reads an estimate of the weights at the forward, for which the changes
            of the weights are averaged; a change that is as old as the delay counts this much
            (D of the paper), in (0, 1) (T2). It takes two more copies. None: live weights.
    """

    annealing: int = 0
    decay: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.annealing, int) or self.annealing < 0:
            raise ValueError(f"annealing must be an integer of at least 0, got {self.annealing!r}")
        if self.decay is not None and not 0 < self.decay < 1:
            raise ValueError(f"decay must be in (0, 1) or None, got {self.decay!r}")

    def versions(self, layout: PipelineShape) -> Versions:
        """Whatever the weights are at the time, or the estimate."""
        return Live() if self.decay is None else Recomputed()

    def rate_factor(self, layout: PipelineShape, stage: int, update: int) -> float:
        """What the learning rate of a stage is multiplied by in its update number ``update``."""
        power = max(0.0, 1 - update / self.annealing) if self.annealing else 0.0
        return float(max(1, delay(layout, stage)) ** -power)

    def weight_predictor(
        self,
        layout: PipelineShape,
        stage: int,
        optimizer: Optimizer,
        weights: Sequence[FlatBuckets],
    ) -> WeightPredictor:
        """The optimizer's steps at the stage's rate, remembering where they go."""
        weight_predictor = super().weight_predictor(layout, stage, optimizer, weights)
        if self.decay is not None and delay(layout, stage):
            per_update = self.decay ** (1 / delay(layout, stage))
            weight_predictor = DiscrepancyCorrected(
                weight_predictor, optimizer, weights, per_update
            )
        if self.annealing:
            weight_predictor = LRRescheduled(
                weight_predictor, optimizer, lambda update: self.rate_factor(layout, stage, update)
            )
        return weight_predictor


def delay(layout: PipelineShape, stage: int) -> int:
    """Updates of a stage between a microbatch's forward and its update, once the pipe is full."""
    return layout.num_stages - 1 - stage
