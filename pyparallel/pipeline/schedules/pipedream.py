"""Weight stashing."""

from dataclasses import dataclass

from .shape import PipelineShape
from .streaming import Streaming
from .versions import Live, Stashed, Versions


@dataclass(frozen=True)
class PipeDream(Streaming):
    """1F1B without flush, each microbatch on one version per stage (Narayanan et al., SOSP 2019).

    Stage s of D keeps D - s versions, and its gradients are D - 1 - s updates late.
    """

    def versions(self, layout: PipelineShape) -> Versions:
        """The weights at the forward, kept for the backward."""
        return Stashed(Live())
