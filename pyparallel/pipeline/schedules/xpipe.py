"""Weight prediction once for the microbatches of a call."""

from dataclasses import dataclass

from ..prediction.base import Prediction
from ..prediction.displacement import Displacement
from .shape import PipelineShape
from .streaming import UpdatingOncePerCall
from .versions import Predicted, Versions, in_mode


@dataclass(frozen=True)
class XPipe(UpdatingOncePerCall):
    """Microbatches of different calls interleave; the first of each predicts for the others.

    Guan et al., arXiv 1911.04610. One update a call. The horizon is the true version difference
    between the first microbatch's forward and the update that takes the call's gradients.

    Args:
        weights: "live": the backward reads the weights as they are then; "consistent": it reads
            what the forward has read.
        prediction: ``Displacement()``, the optimizer's own rule, or ``Rollout()``.
    """

    weights: str = "live"
    prediction: Prediction = Displacement()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        in_mode(self.weights, Predicted())

    def versions(self, layout: PipelineShape) -> Versions:
        """Predicted by the first microbatch of a call."""
        return in_mode(self.weights, Predicted())
