"""The schedule for optimizers that correct the delay with a Nesterov look-ahead."""

from dataclasses import dataclass

from typing_extensions import override

from .shape import PipelineShape
from .streaming import Streaming
from .versions import Live, Versions, in_mode


@dataclass(frozen=True, repr=False)
class Nesterov(Streaming):
    """1F1B without flush, for an optimizer with a Nesterov-type correction of the delay.

    Ajanthan et al., ICML 2025, arXiv 2505.01099. The order and the versions are PipeDream's; the
    correction is in the optimizer: delayed gradients g are discounted by 1 - u, and computed at the
    look-ahead point ``w + d``,

        d = u * (w - last w);  next w = w + d - lr * (1 - u) * g.

    With a constant momentum u this is torch's Nesterov momentum, which keeps the look-ahead points
    as its parameters: ``SGD(parameters, lr * (1 - u), momentum=u, nesterov=True)``. The authors'
    code uses ``NAdam(parameters, lr, betas=(0.99, 0.999), weight_decay=...,
    decoupled_weight_decay=True)``, which discounts in the same way. With ``weights="live"`` the
    weights of the forward are not stashed for the backward, which takes one copy.
    """

    weights: str = "consistent"

    def __post_init__(self) -> None:
        super().__post_init__()
        in_mode(self.weights, Live())

    @override
    def streaming_versions(self, shape: PipelineShape) -> Versions:
        return in_mode(self.weights, Live())
