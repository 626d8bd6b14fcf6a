"""The XPipe schedule: one weight prediction for all microbatches of a step."""

from dataclasses import dataclass

from typing_extensions import override

from ..prediction.base import Prediction
from ..prediction.displacement import Displacement
from .shape import PipelineShape
from .streaming import Streaming
from .versions import Predicted, Versions, in_mode


@dataclass(frozen=True, repr=False)
class XPipe(Streaming):
    """1F1B without flush; the first microbatch of a step predicts the weights for all of them.

    Guan et al., arXiv 1911.04610. One update per step. The horizon is the true version difference
    between the first microbatch's forward and the update with the step's gradients.

    Args:
        weights: "live": the backward reads the live weights; "consistent": it reads the weights of
            its forward.
        prediction: ``Displacement()``, the optimizer's own rule, or ``Rollout()``.
    """

    updates_once_per_step = True

    weights: str = "live"
    prediction: Prediction = Displacement()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        super().__post_init__()
        in_mode(self.weights, Predicted())

    @override
    def streaming_versions(self, shape: PipelineShape) -> Versions:
        return in_mode(self.weights, Predicted())
