"""Whether a subnet makes up for the units it lacks, or the whole model for having them all."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from .partition.partition import Partition
from .partition.sampling import sizes
from .partition.width import CutDim


class Scale(Protocol):
    """The policy: an immutable object whose ``repr`` says all of it."""

    def apply(self, subnet: nn.Module, widths: Iterable[CutDim], rank: int, num_ranks: int) -> None:
        """Called once, when a rank's subnet has been built."""

    def enlargement(self, num_ranks: int) -> int:
        """How many times larger in a subnet the weights are that consume units."""


@dataclass(frozen=True)
class Unscaled:
    """Nothing is scaled, as in the paper: the whole model's sums then have n times the terms.

    BatchNorm behind them takes that back, once its statistics are measured anew. Where nothing
    does, as in the blocks of a transformer, choose ``Averaged()``.
    """

    def apply(self, subnet: nn.Module, widths: Iterable[CutDim], rank: int, num_ranks: int) -> None:
        """Nothing."""

    def enlargement(self, num_ranks: int) -> int:
        """1: they are the same."""
        return 1


@dataclass(frozen=True)
class Averaged:
    """What consumes units has n times the weights in a subnet that it has in the whole model.

    So the whole model's sums are the mean of its subnets', as dropout's are when it is not training
    (weight scaling: Srivastava et al., JMLR 15, 2014). The weights that a trainer is given are the
    whole model's, to rounding where n is no power of two. New layers are n times too large for
    subnets, then: let ``shrink_consumers`` divide what torch has initialized.
    """

    def apply(self, subnet: nn.Module, widths: Iterable[CutDim], rank: int, num_ranks: int) -> None:
        """Nothing."""

    def enlargement(self, num_ranks: int) -> int:
        """As many times as there are subnets."""
        return num_ranks


@dataclass(frozen=True)
class Scaled:
    """In a subnet, what consumes units takes them times all units over those it has.

    As inverted dropout does: its sums are then as large as the whole model's. Weights stay as they
    are, and the whole model is not scaled.
    """

    def apply(self, subnet: nn.Module, widths: Iterable[CutDim], rank: int, num_ranks: int) -> None:
        """Put a hook before each consumer."""
        for width in widths:
            kept = sizes(width.units, num_ranks)[rank]
            if kept < width.units:
                for name in width.consumers:
                    hook = _Multiply(width.units / kept)
                    subnet.get_submodule(name).register_forward_pre_hook(hook)

    def enlargement(self, num_ranks: int) -> int:
        """1: they are the same, and their inputs are not."""
        return 1


@dataclass(frozen=True)
class _Multiply:
    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = inputs
        return first * self.factor, *others


@torch.no_grad()
def shrink_consumers(module: nn.Module, partition: Partition, times: int) -> None:
    """Divide the weights that consume units: what new layers begin with before ``Averaged()``.

    Args:
        module: the whole model, before a trainer takes it.
        partition: the trainer's.
        times: ``scale.enlargement(num_ranks)``.
    """
    for width in partition.widths(module):
        for name in width.consumer_weights:
            module.get_parameter(name).div_(times)
