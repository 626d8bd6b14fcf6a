"""The PipeDream-2BW schedule: two weight versions at any depth."""

from dataclasses import dataclass

from .shape import PipelineShape
from .streaming import Streaming
from .versions import Delayed, Stashed, Versions


@dataclass(frozen=True)
class PipeDream2BW(Streaming):
    """One update per step, and gradients with a staleness of one update on every stage.

    Narayanan et al., ICML 2021: W(t+1) = W(t) - lr * gradient at W(t-1).

    The paper requires at least as many microbatches as stages. With fewer than stages - 1 the delay
    grows to ceil((stages - 1) / microbatches), the smallest that all stages can share, and the
    versions kept to one more; with one stage there is no delay.
    """

    updates_once_per_step = True

    def delay(self, shape: PipelineShape, stage: int) -> int:
        """Return the delay of the first stage, which all stages share."""
        return super().delay(shape, 0)

    def versions(self, shape: PipelineShape) -> Versions:
        """Return the previous version, for forward and backward."""
        return Stashed(Delayed(self.delay(shape, 0)))
