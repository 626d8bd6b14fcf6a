"""Two versions of the weights, whatever the depth."""

from dataclasses import dataclass

from .shape import PipelineShape
from .streaming import UpdatingOncePerCall
from .versions import Delayed, Stashed, Versions


@dataclass(frozen=True)
class PipeDream2BW(UpdatingOncePerCall):
    """One update a call, and gradients one update late on every stage.

    Narayanan et al., ICML 2021: W(t+1) = W(t) - lr * gradient at W(t-1).

    The paper asks for at least as many microbatches as stages. With fewer than the stages less one
    the delay grows to ceil((stages - 1) / microbatches), the least that every stage can hold to,
    and the versions kept to one more; with one stage there is no delay.
    """

    def versions(self, layout: PipelineShape) -> Versions:
        """The version before the newest, in forward and backward."""
        return Stashed(Delayed(-(-(layout.num_stages - 1) // layout.num_microbatches)))
