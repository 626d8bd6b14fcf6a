"""The PipeOptim schedule: forwards on weights predicted by the optimizer's own rule."""

from dataclasses import dataclass

from typing_extensions import override

from ..prediction.base import Prediction
from ..prediction.displacement import Displacement
from .shape import PipelineShape
from .streaming import Streaming
from .versions import Predicted, Versions, in_mode


@dataclass(frozen=True, repr=False)
class PipeOptim(Streaming):
    """1F1B without flush, forwards on weights predicted by the optimizer's own rule.

    Guan et al., TKDE 2025, arXiv 2312.00839. The horizon is the true version difference,
    min(microbatches in flight, stages - 1 - stage).

    Args:
        weights: "live" (the paper): the backward reads the live weights, so that two copies are
            enough; "consistent": it reads the weights of its forward.
        prediction: ``Displacement()``, the optimizer's own rule, or ``Rollout()``.
    """

    weights: str = "live"
    prediction: Prediction = Displacement()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        super().__post_init__()
        in_mode(self.weights, Predicted())

    @override
    def streaming_versions(self, shape: PipelineShape) -> Versions:
        return in_mode(self.weights, Predicted())
