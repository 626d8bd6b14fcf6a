"""The window of interlocking backpropagation: which losses each stage learns from.

Stages are numbered from 0, losses by the stage that they belong to: the last one is the true loss,
the others are those of auxiliary heads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from typing_extensions import override


class Losses(Protocol):
    """How the losses of a window are combined into the loss that a stage learns from."""

    def weight(self, origin: int, stage: int, farthest: int) -> float:
        """Return the weight of the loss of stage ``origin`` in what ``stage`` learns from.

        ``origin`` lies between ``stage`` and ``farthest``, the end of its window.
        """


@dataclass(frozen=True)
class Farthest(Losses):
    """The farthest loss of the window alone (Gomez et al., JMLR 2022)."""

    @override
    def weight(self, origin: int, stage: int, farthest: int) -> float:
        return float(origin == farthest)


@dataclass(frozen=True)
class Sum(Losses):
    """The sum of the losses of the window."""

    @override
    def weight(self, origin: int, stage: int, farthest: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Mean(Losses):
    """The mean of the losses of the window."""

    @override
    def weight(self, origin: int, stage: int, farthest: int) -> float:
        return 1 / (farthest - stage + 1)


@dataclass(frozen=True)
class Window:
    """Which losses each stage learns from, and which gradients are sent for it."""

    num_stages: int
    size: int  # how many losses a stage can learn from: 1 is local learning
    losses: Losses

    def farthest(self, stage: int) -> int:
        """Return the last loss of a stage's window, whose gradient arrives last."""
        return min(stage + self.size - 1, self.num_stages - 1)

    def weight(self, origin: int, stage: int) -> float:
        """Return the weight of a loss in what a stage learns from; 0 outside its window."""
        farthest = self.farthest(stage)
        return self.losses.weight(origin, stage, farthest) if stage <= origin <= farthest else 0.0

    def origins(self, stage: int) -> frozenset[int]:
        """Return the losses that a stage learns from."""
        return self._origins[stage]

    def wanted(self, origin: int, stage: int) -> bool:
        """Return whether a gradient is needed at a stage's output: one up to here learns from it.

        The paper sends also those of the first ``size - 1`` heads, which no stage learns from.
        """
        return any(origin in self._origins[each] for each in range(min(stage, origin) + 1))

    def arriving(self, stage: int) -> tuple[int, ...]:
        """Return the losses whose gradients a stage receives from the next one."""
        later = range(stage + 1, self.num_stages)
        return tuple(origin for origin in later if self.wanted(origin, stage))

    def acknowledges(self, stage: int) -> bool:
        """Return whether a stage acknowledges forwards to the previous one, as no gradients do."""
        return 0 < stage < self.num_stages and not self.arriving(stage - 1)

    @cached_property
    def _origins(self) -> tuple[frozenset[int], ...]:
        stages = range(self.num_stages)
        return tuple(
            frozenset(origin for origin in stages if self.weight(origin, stage)) for stage in stages
        )
