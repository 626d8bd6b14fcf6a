"""Staleness corrected by the optimizer's look-ahead."""

from dataclasses import dataclass

from .layout import Layout
from .streaming import Streaming
from .versions import Live, Versions, in_mode


@dataclass(frozen=True)
class Nesterov(Streaming):
    """1F1B without flush, for an optimizer with a Nesterov-type correction of the delay.

    Ajanthan et al., ICML 2025. The order and the versions are PipeDream's; the correction is in the
    optimizer.

    Args:
        weights: "consistent": the weights at the forward are kept for the backward; "live": they
            are not, which takes one copy.
    """

    weights: str = "consistent"

    def __post_init__(self) -> None:
        in_mode(self.weights, Live())

    def versions(self, layout: Layout) -> Versions:
        """The weights at the forward, kept or not."""
        return in_mode(self.weights, Live())
