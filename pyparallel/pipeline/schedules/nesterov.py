"""Staleness corrected by the optimizer's look-ahead."""

from dataclasses import dataclass

from .shape import PipelineShape
from .streaming import Streaming
from .versions import Live, Versions, in_mode


@dataclass(frozen=True)
class Nesterov(Streaming):
    """1F1B without flush, for an optimizer with a Nesterov-type correction of the delay.

    Ajanthan et al., ICML 2025, arXiv 2505.01099. The order and the versions are PipeDream's; the
    correction is in the optimizer: gradients g that come late are discounted by 1 - u, and taken at
    the look-ahead point ``w + d``,

        d = u * (w - last w);  next w = w + d - lr * (1 - u) * g.

    With a constant momentum u that is torch's own Nesterov momentum, which keeps the look-ahead
    points as its parameters: ``SGD(parameters, lr * (1 - u), momentum=u, nesterov=True)``. The
    authors' program takes ``NAdam(parameters, lr, betas=(0.99, 0.999), weight_decay=...,
    decoupled_weight_decay=True)``, which discounts likewise. Their variant without kept weights
    also changes rates and momenta by stage; here "live" does not.

    Args:
        weights: "consistent": the weights at the forward are kept for the backward; "live": they
            are not, which takes one copy.
    """

    weights: str = "consistent"

    def __post_init__(self) -> None:
        in_mode(self.weights, Live())

    def versions(self, layout: PipelineShape) -> Versions:
        """The weights at the forward, kept or not."""
        return in_mode(self.weights, Live())
