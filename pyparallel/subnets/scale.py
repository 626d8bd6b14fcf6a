"""Scaling that compensates for the different numbers of units in a subnet and the full model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from typing_extensions import override

from .partition.cut_dim import CutDim
from .partition.partition import Partition
from .partition.unit_assignment import sizes


class Scale(Protocol):
    """Policy for scaling weights or activations: immutable, with a complete ``repr``."""

    def apply(
        self, subnet: nn.Module, cut_dims: Iterable[CutDim], rank: int, num_ranks: int
    ) -> None:
        """Modify a rank's subnet, once it has been built; default: leave it unchanged."""
        return

    def enlargement(self, num_ranks: int) -> int:
        """Return the factor of the consumers' weights in a subnet over the full model's."""
        return 1


@dataclass(frozen=True)
class Unscaled(Scale):
    """Policy without scaling, as in the paper: the full model's sums have n times the terms.

    A BatchNorm after them corrects this once its statistics are recalibrated. Without one, as in
    the blocks of a transformer, choose ``Averaged()``.
    """


@dataclass(frozen=True)
class Averaged(Scale):
    """Policy with n times larger consumer weights in a subnet than in the full model.

    So the full model's sums are the mean of its subnets', as with dropout in eval mode (weight
    scaling: Srivastava et al., JMLR 15, 2014). The weights given to a trainer are the full model's,
    up to rounding if n is no power of two. Freshly initialized layers are therefore n times too
    large in subnets: divide them with ``shrink_consumers`` first.
    """

    @override
    def enlargement(self, num_ranks: int) -> int:
        return num_ranks


@dataclass(frozen=True)
class Scaled(Scale):
    """Policy that multiplies consumers' inputs in a subnet by all units over the subnet's.

    As in inverted dropout, its sums are then as large as the full model's. Weights stay unchanged,
    and the full model is not scaled.
    """

    @override
    def apply(
        self, subnet: nn.Module, cut_dims: Iterable[CutDim], rank: int, num_ranks: int
    ) -> None:
        for cut_dim in cut_dims:
            kept = sizes(cut_dim.units, num_ranks)[rank]
            if kept < cut_dim.units:
                for name in cut_dim.consumers:
                    hook = _Multiply(cut_dim.units / kept)
                    subnet.get_submodule(name).register_forward_pre_hook(hook)


@dataclass(frozen=True)
class _Multiply:
    factor: float

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = inputs
        return first * self.factor, *others


@torch.no_grad()
def shrink_consumers(module: nn.Module, partition: Partition, times: int) -> None:
    """Divide the weights that consume units, to initialize new layers for ``Averaged()``.

    ``times`` is ``scale.enlargement(num_ranks)``; call it before the trainer gets the module.
    """
    for cut_dim in partition.cut_dims(module):
        for name in cut_dim.consumer_weights:
            module.get_parameter(name).div_(times)
