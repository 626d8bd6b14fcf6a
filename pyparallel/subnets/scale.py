"""Whether a subnet makes up for the units it lacks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from .draw import sizes
from .width import Width


class Scale(Protocol):
    """The policy: an immutable object whose ``repr`` says all of it."""

    def apply(self, subnet: nn.Module, widths: Iterable[Width], rank: int, num_ranks: int) -> None:
        """Called once, when a rank's subnet has been built."""


@dataclass(frozen=True)
class Unscaled:
    """Nothing is scaled, as in the paper: the whole model's sums then have n times the terms."""

    def apply(self, subnet: nn.Module, widths: Iterable[Width], rank: int, num_ranks: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Scaled:
    """In a subnet, what consumes units takes them times all units over those it has.

    As inverted dropout does: its sums are then as large as the whole model's. Weights stay as they
    are, and the whole model is not scaled.
    """

    def apply(self, subnet: nn.Module, widths: Iterable[Width], rank: int, num_ranks: int) -> None:
        """Put a hook before each consumer."""
        for width in widths:
            kept = sizes(width.units, num_ranks)[rank]
            if kept < width.units:
                for name in width.consumers:
                    hook = _Multiply(width.units / kept)
                    subnet.get_submodule(name).register_forward_pre_hook(hook)


@dataclass(frozen=True)
class _Multiply:
    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = inputs
        return first * self.factor, *others
