"""The PipeDream-2BW schedule: two weight versions at any depth."""

from dataclasses import dataclass

from typing_extensions import override

from ...training.arguments import require
from ..prediction.base import NoPrediction, Prediction
from .shape import PipelineShape
from .streaming import Streaming
from .versions import Delayed, Versions, in_mode


@dataclass(frozen=True, repr=False)
class PipeDream2BW(Streaming):
    """One update per step, and gradients with a staleness of one update on every stage.

    Narayanan et al., ICML 2021: W(t+1) = W(t) - lr * gradient at W(t-1).

    The paper requires at least as many microbatches as stages. With fewer than stages - 1 the delay
    grows to ceil((stages - 1) / microbatches), the smallest that all stages can share, and the
    versions kept to one more; with one stage there is no delay.

    Args:
        weights: "consistent" (the paper): the backward reads the weights of its forward; "live": it
            reads the live weights, with a prediction alone.
        prediction: ``Displacement()``: forwards read W(t-1) predicted one update ahead, which takes
            at least stages - 1 microbatches and, if consistent, one more copy of the weights;
            ``NoPrediction()`` (the paper): they read W(t-1).
    """

    updates_once_per_step = True

    weights: str = "consistent"
    prediction: Prediction = NoPrediction()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        super().__post_init__()
        in_mode(self.weights, Delayed(1))
        rule = 'weights must be "consistent" without a prediction'
        require(self.weights == "consistent" or self._predicts, rule, repr(self.weights))

    @property
    def _predicts(self) -> bool:
        return not isinstance(self.prediction, NoPrediction)

    @override
    def error_at(self, shape: PipelineShape) -> str | None:
        if not self._predicts or shape.num_microbatches >= shape.num_stages - 1:
            return None
        return (
            "num_microbatches must be at least num_stages - 1 for PipeDream2BW with a prediction, "
            f"which is of one update, got {shape.num_microbatches} for {shape.num_stages} stages"
        )

    @override
    def delay(self, shape: PipelineShape, stage: int) -> int:
        return super().delay(shape, 0)

    @override
    def streaming_versions(self, shape: PipelineShape) -> Versions:
        return in_mode(self.weights, Delayed(self.delay(shape, 0), self._predicts))
