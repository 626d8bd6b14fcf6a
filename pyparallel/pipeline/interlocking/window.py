"""Whose loss a module learns from when gradients travel a limited way: a policy without tensors.

Stages are numbered from 0, losses by the stage whose output they judge: the last one is the true
loss, the others are those of auxiliary heads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol


class Losses(Protocol):
    """How the losses that reach a stage make up what it learns from."""

    def weight(self, origin: int, stage: int, farthest: int) -> float:
        """Of the loss of ``origin`` in the gradient of a stage whose window ends at ``farthest``.

        ``stage <= origin <= farthest``.
        """


@dataclass(frozen=True)
class Farthest:
    """The farthest loss of the window alone (Gomez et al., JMLR 2022)."""

    def weight(self, origin: int, stage: int, farthest: int) -> float:
        """1 for the end of the window."""
        return float(origin == farthest)


@dataclass(frozen=True)
class Sum:
    """All losses of the window, added up."""

    def weight(self, origin: int, stage: int, farthest: int) -> float:
        """1 for each."""
        return 1.0


@dataclass(frozen=True)
class Mean:
    """The mean of the losses of the window."""

    def weight(self, origin: int, stage: int, farthest: int) -> float:
        """The same for each."""
        return 1 / (farthest - stage + 1)


@dataclass(frozen=True)
class Window:
    """Which losses each stage learns from, and which gradients travel for it.

    Args:
        num_stages: all of them.
        size: how many losses are in reach of a stage, its own among them: 1 is local learning,
            ``num_stages`` plain backpropagation.
        losses: what a stage makes of those.
    """

    num_stages: int
    size: int
    losses: Losses

    def farthest(self, stage: int) -> int:
        """The last loss in reach of a stage: its gradient comes last."""
        return min(stage + self.size - 1, self.num_stages - 1)

    def weight(self, origin: int, stage: int) -> float:
        """Of a loss in the gradient of a stage's weights."""
        farthest = self.farthest(stage)
        return self.losses.weight(origin, stage, farthest) if stage <= origin <= farthest else 0.0

    def origins(self, stage: int) -> frozenset[int]:
        """The losses that a stage learns from."""
        return self._origins[stage]

    def wanted(self, origin: int, stage: int) -> bool:
        """Whether the gradient of a loss with respect to a stage's output is of use.

        It is where this stage, or one before it, learns from that loss. Of the min(size - 1,
        num_stages - stage) gradients that the paper sends to the stage before, these are all but
        those of the first ``size - 1`` heads, from which no weights learn under ``Farthest``.
        """
        return any(origin in self._origins[each] for each in range(min(stage, origin) + 1))

    def arriving(self, stage: int) -> tuple[int, ...]:
        """The losses whose gradients a stage gets from the next one."""
        beyond = range(stage + 1, self.num_stages)
        return tuple(origin for origin in beyond if self.wanted(origin, stage))

    @cached_property
    def _origins(self) -> tuple[frozenset[int], ...]:
        stages = range(self.num_stages)
        return tuple(
            frozenset(origin for origin in stages if self.weight(origin, stage)) for stage in stages
        )
