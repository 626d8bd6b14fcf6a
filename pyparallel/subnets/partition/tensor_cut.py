"""How one parameter or buffer is cut: along no, one or two of its dimensions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .sampling import sizes
from .width import CutDim, Place

Draw = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class TensorCut:
    """The cuts of one tensor.

    Args:
        shape: of the whole.
        axes: for each dimension that is cut, the width along it and how it lies there.
    """

    shape: tuple[int, ...]
    axes: Mapping[int, tuple[CutDim, Place]] = field(default_factory=dict)

    def indices(self, draw: Draw, subnet: int) -> dict[int, Tensor]:
        """The entries along each dimension that is cut which a subnet has: ascending."""
        return {
            dim: place.entries(draw[width.name][subnet], width.units)
            for dim, (width, place) in self.axes.items()
        }

    def part_shape(self, subnet: int, num_subnets: int) -> tuple[int, ...]:
        """Of what a subnet has of the tensor, in any round."""
        shape = list(self.shape)
        for dim, (width, place) in self.axes.items():
            shape[dim] = place.length(sizes(width.units, num_subnets)[subnet])
        return tuple(shape)


@dataclass(frozen=True)
class Block:
    """What an owner of rows and a subnet have in common of a tensor.

    Args:
        span: its rows in the subnet's part.
        shape: as it travels.
        chosen: its entries in the owner's rows, along each dimension that is cut.
    """

    span: slice
    shape: tuple[int, ...]
    chosen: Mapping[int, Tensor]

    def take(self, rows: Tensor) -> Tensor:
        """A copy from the owner's rows, or a view of them if all of them are meant."""
        for dim, entries in self.chosen.items():
            rows = rows.index_select(dim, entries.to(rows.device))
        return rows

    def put_(self, rows: Tensor, values: Tensor) -> None:
        """Overwrite it in the owner's rows."""
        chosen = {dim: entries.to(rows.device) for dim, entries in self.chosen.items()}
        if not chosen:
            rows.copy_(values)
        elif len(chosen) == 1:
            ((dim, entries),) = chosen.items()
            rows.index_copy_(dim, entries, values)
        else:
            rows[_grid(rows, chosen)] = values


def block_of(cut: TensorCut, indices: Mapping[int, Tensor], owned: range) -> Block:
    """What a subnet with these indices and the owner of these rows have in common."""
    shape = list(cut.shape)
    for dim, entries in indices.items():
        shape[dim] = len(entries)
    if 0 not in indices:
        span = slice(owned.start, owned.stop)
        return Block(span, (len(owned), *shape[1:]), indices)
    bounds = torch.tensor([owned.start, owned.stop])
    first, last = torch.searchsorted(indices[0], bounds).tolist()
    chosen = {**indices, 0: indices[0][first:last] - owned.start}
    return Block(slice(first, last), (last - first, *shape[1:]), chosen)


def find_cuts(widths: Iterable[CutDim], tensors: Mapping[str, Tensor]) -> dict[str, TensorCut]:
    """The cuts of all tensors that a width lies in, by name, in the order of the tensors."""
    axes: dict[str, dict[int, tuple[CutDim, Place]]] = {}
    for width in widths:
        for place in width.places:
            axes.setdefault(place.tensor, {})[place.dim] = (width, place)
    return {
        name: TensorCut(tuple(tensor.shape), dict(sorted(axes[name].items())))
        for name, tensor in tensors.items()
        if name in axes
    }


def _grid(rows: Tensor, chosen: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    """An index for each dimension up to the last that is cut; together they span the block."""
    last = max(chosen)
    lines = []
    for dim in range(last + 1):
        entries = chosen.get(dim)
        if entries is None:
            entries = torch.arange(rows.shape[dim], device=rows.device)
        lines.append(entries.view(-1, *[1] * (last - dim)))
    return tuple(lines)
