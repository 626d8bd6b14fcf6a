"""No versions at all."""

from dataclasses import dataclass

from .layout import Layout
from .streaming import Streaming
from .versions import Live, Versions


@dataclass(frozen=True)
class PipeMare(Streaming):
    """1F1B without flush on live weights, both ways (Yang et al., MLSys 2021).

    One copy of the weights; what the paper does against staleness is the learning rate's business,
    not the order's.
    """

    def versions(self, layout: Layout) -> Versions:
        """Whatever the weights are at the time."""
        return Live()
