"""The PipeDream schedule: 1F1B without flush, with weight stashing."""

from dataclasses import dataclass

from typing_extensions import override

from .shape import PipelineShape
from .streaming import Streaming
from .versions import Live, Stashed, Versions


@dataclass(frozen=True, repr=False)
class PipeDream(Streaming):
    """1F1B without flush, each microbatch on one version per stage (Narayanan et al., SOSP 2019).

    Stage s of D keeps D - s versions; its gradients have a staleness of D - 1 - s updates.
    """

    @override
    def streaming_versions(self, shape: PipelineShape) -> Versions:
        return Stashed(Live())
