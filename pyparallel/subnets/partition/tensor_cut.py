"""How one parameter or buffer is cut: along zero, one or two of its dimensions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cut_dim import CutDim, Place
from .unit_assignment import sizes

Draw = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class TensorCut:
    """The cuts of one full tensor: for each dimension that is cut, where its units lie."""

    shape: tuple[int, ...]
    axes: Mapping[int, tuple[CutDim, Place]] = field(default_factory=dict)

    def indices(self, draw: Draw, subnet: int) -> dict[int, Tensor]:
        """Return a subnet's indices along each dimension that is cut, ascending."""
        return {
            dim: place.entries(draw[cut_dim.name][subnet], cut_dim.units)
            for dim, (cut_dim, place) in self.axes.items()
        }

    def part_shape(self, subnet: int, num_subnets: int) -> tuple[int, ...]:
        """Return the shape of a subnet's part of the tensor, the same in every round."""
        shape = list(self.shape)
        for dim, (cut_dim, place) in self.axes.items():
            shape[dim] = place.length(sizes(cut_dim.units, num_subnets)[subnet])
        return tuple(shape)


@dataclass(frozen=True)
class Block:
    """The intersection of an owner's rows and a subnet's part of a tensor."""

    span: slice  # rows of the block in the subnet's part
    shape: tuple[int, ...]
    chosen: Mapping[int, Tensor]  # indices in the owner's rows, along each dimension that is cut

    def take(self, rows: Tensor) -> Tensor:
        """Return the block from the owner's rows: a copy, or a view if no dimension is cut."""
        for dim, entries in self.chosen.items():
            rows = rows.index_select(dim, entries.to(rows.device))
        return rows

    def put_(self, rows: Tensor, values: Tensor) -> None:
        """Overwrite the block in the owner's rows."""
        chosen = {dim: entries.to(rows.device) for dim, entries in self.chosen.items()}
        if not chosen:
            rows.copy_(values)
        elif len(chosen) == 1:
            ((dim, entries),) = chosen.items()
            rows.index_copy_(dim, entries, values)
        else:
            rows[_grid(rows, chosen)] = values


def block_of(cut: TensorCut, indices: Mapping[int, Tensor], owned: range) -> Block:
    """Return the block shared by a subnet with these indices and the owner of these rows."""
    shape = list(cut.shape)
    for dim, entries in indices.items():
        shape[dim] = len(entries)
    if 0 not in indices:
        span = slice(owned.start, owned.stop)
        return Block(span, (len(owned), *shape[1:]), indices)
    bounds = torch.tensor([owned.start, owned.stop], device="cpu")
    first, last = torch.searchsorted(indices[0], bounds).tolist()
    chosen = {**indices, 0: indices[0][first:last] - owned.start}
    return Block(slice(first, last), (last - first, *shape[1:]), chosen)


def find_cuts(cut_dims: Iterable[CutDim], tensors: Mapping[str, Tensor]) -> dict[str, TensorCut]:
    """Return the cuts of all tensors that have a cut dimension, by name, in the tensors' order."""
    axes: dict[str, dict[int, tuple[CutDim, Place]]] = {}
    for cut_dim in cut_dims:
        for place in cut_dim.places:
            axes.setdefault(place.tensor, {})[place.dim] = (cut_dim, place)
    return {
        name: TensorCut(tuple(tensor.shape), dict(sorted(axes[name].items())))
        for name, tensor in tensors.items()
        if name in axes
    }


def _grid(rows: Tensor, chosen: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    """Return an index tensor per dimension, up to the last cut one, that span the block."""
    last = max(chosen)
    lines = []
    for dim in range(last + 1):
        entries = chosen.get(dim)
        if entries is None:
            entries = torch.arange(rows.shape[dim], device=rows.device)
        lines.append(entries.view(-1, *[1] * (last - dim)))
    return tuple(lines)
