"""The SpecTrain schedule: weights predicted by momentum."""

from dataclasses import dataclass

from typing_extensions import override

from ...training.arguments import check_one_of
from ..prediction.base import Prediction
from ..prediction.displacement import Displacement
from .shape import PipelineShape
from .streaming import Streaming
from .versions import Predicted, Speculative, Stashed, Versions


@dataclass(frozen=True, repr=False)
class SpecTrain(Streaming):
    """1F1B without flush, on weights predicted by momentum (Chen et al., arXiv 1809.02839).

    Args:
        variant: 1 (the paper): stage k of N predicts k // 2 + N - 1 - k updates ahead in the
            forward and k // 2 in the backward. 2 (the authors' second version): it predicts
            N - 1 - k updates ahead in the forward, and stashes these weights for the backward. In
            warm-up the true version difference replaces N - 1 - k.
        prediction: ``Displacement()``, which is the momentum with SGD, or ``Rollout()``.
    """

    variant: int = 1
    prediction: Prediction = Displacement()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("variant", self.variant, (1, 2))

    @override
    def streaming_versions(self, shape: PipelineShape) -> Versions:
        return Speculative() if self.variant == 1 else Stashed(Predicted())
