"""A width: units that are dealt out among subnets, and where they lie in parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """One dimension of a parameter or buffer that a width lies along.

    Along it come ``blocks`` times all the units, each ``unit_size`` entries long.

    Args:
        tensor: its name, as ``named_parameters`` gives it.
        dim: the dimension.
        unit_size: neighboring entries of one unit: 1 for a neuron, more for a head or after a
            flatten.
        blocks: how often the units come: 3 in the fused queries, keys and values of attention.
    """

    tensor: str
    dim: int
    unit_size: int = 1
    blocks: int = 1

    def entries(self, chosen: Tensor, units: int) -> Tensor:
        """Where the chosen ones of so many units lie: int64, ascending if they are."""
        if self.blocks == self.unit_size == 1:
            return chosen
        blocks = torch.arange(self.blocks).view(-1, 1, 1) * units
        within = torch.arange(self.unit_size)
        return ((blocks + chosen.view(1, -1, 1)) * self.unit_size + within).flatten()

    def length(self, units: int) -> int:
        """Of the dimension, with so many units."""
        return self.blocks * units * self.unit_size


@dataclass(frozen=True)
class Count:
    """An attribute of a module that counts units, or entries of them: ``num_heads``.

    Args:
        module: its name, "" for the outermost.
        attribute: the attribute.
        per_unit: what each unit adds to it.
    """

    module: str
    attribute: str
    per_unit: int = 1


@dataclass(frozen=True)
class CutDim:
    """Units that are cut together wherever they lie: hidden neurons, channels, heads.

    Args:
        name: of the module that first produces the units.
        units: how many there are.
        places: where they lie.
        counts: what counts them.
        consumers: names of the modules whose input they are, each with a ``weight`` they lie in.
    """

    name: str
    units: int
    places: tuple[Place, ...]
    counts: tuple[Count, ...] = ()
    consumers: tuple[str, ...] = ()

    @property
    def consumer_weights(self) -> list[str]:
        """The consumers' weights, by name."""
        return [f"{name}.weight" for name in self.consumers]
