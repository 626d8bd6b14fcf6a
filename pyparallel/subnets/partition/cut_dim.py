"""Cut dimensions: units that are divided among subnets, and where they lie in parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """One dimension of a parameter or buffer along which units lie.

    Along it all the units are repeated ``blocks`` times, each ``unit_size`` entries long.

    Args:
        tensor: name of the parameter or buffer, as in ``named_parameters``.
        unit_size: neighboring entries of one unit: 1 for a neuron, more for a head or after a
            Flatten.
        blocks: repetitions of the units: 3 in the fused queries, keys and values of attention.
    """

    tensor: str
    dim: int
    unit_size: int = 1
    blocks: int = 1

    def entries(self, chosen: Tensor, units: int) -> Tensor:
        """Return the indices, int64, of the chosen units, ascending if these are."""
        if self.blocks == self.unit_size == 1:
            return chosen
        blocks = torch.arange(self.blocks, device="cpu").view(-1, 1, 1) * units
        within = torch.arange(self.unit_size, device="cpu")
        return ((blocks + chosen.view(1, -1, 1)) * self.unit_size + within).flatten()

    def length(self, units: int) -> int:
        """Return the length of the dimension for this number of units."""
        return self.blocks * units * self.unit_size


@dataclass(frozen=True)
class Count:
    """An attribute of a module that counts units or their entries, such as ``num_heads``.

    ``module`` is its name, "" for the model itself; ``per_unit`` its increase per unit.
    """

    module: str
    attribute: str
    per_unit: int = 1


@dataclass(frozen=True)
class CutDim:
    """Units that are cut together wherever they lie: hidden neurons, channels, heads.

    ``name`` is of the module that produces the units; ``consumers`` are those of the modules that
    read them, each with a ``weight`` in which they lie.
    """

    name: str
    units: int
    places: tuple[Place, ...]
    counts: tuple[Count, ...] = ()
    consumers: tuple[str, ...] = ()

    @property
    def consumer_weights(self) -> list[str]:
        """Names of the consumers' weights."""
        return [f"{name}.weight" for name in self.consumers]
