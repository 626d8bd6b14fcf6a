"""The copies of a stage's weights in memory, and the one that its parameters point into."""

from bisect import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...training import FlatBuckets

_STRIDED = torch.strided


class VersionKey(NamedTuple):
    """A ``WeightVersion`` of plain integers, so that it can be a key."""

    version: int
    horizon: int


class _View(NamedTuple):
    """A view of a copy that autograd has saved; ``address`` is of its first element."""

    address: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool


class WeightCopy:
    """One copy of the weights."""

    def __init__(self, buffers: Sequence[Tensor], views: Sequence[Tensor]) -> None:
        self.buffers = buffers
        self.views = views
        self.counterparts: dict[tuple[Any, ...], Tensor] = {}  # of the others' views

    def view(self, buffer: int, begin: int, like: _View) -> Tensor:
        """Return the view that begins at a byte of a buffer, like one of another copy."""
        flat = self.buffers[buffer]
        if like.dtype != flat.dtype:
            flat = flat.view(like.dtype)
        found = flat.as_strided(like.size, like.stride, begin // like.dtype.itemsize)
        found = found.conj() if like.conjugate else found
        return torch._neg_view(found) if like.negative else found


class WeightCopies:
    """All copies of a stage's weights; ``current`` is the one that its parameters point into."""

    def __init__(self, weights: Sequence[FlatBuckets]) -> None:
        self._weights = weights
        self._parameters = [parameter for each in weights for parameter in each.parameters]
        self._edges: list[int] = []  # the begin and the end of each buffer in memory, ascending
        self._owners: list[tuple[WeightCopy, int]] = []  # of the buffers, likewise
        self.current = self._new_copy([buffer for each in weights for buffer in each.buffers])

    def allocate(self) -> WeightCopy:
        """Return a new copy, of zeros; its memory is kept."""
        first = (buffer for each in self._weights for buffer in each.buffers)
        return self._new_copy([torch.zeros_like(buffer) for buffer in first])

    def point_to(self, copy: WeightCopy) -> None:
        """Point the parameters into a copy."""
        if copy is not self.current:
            self.restore(copy)

    def restore(self, copy: WeightCopy) -> None:
        """Point the parameters into a copy, wherever an interrupt has left them."""
        torch.clear_autocast_cache()  # of casts of the parameters' old contents
        for parameter, view in zip(self._parameters, copy.views, strict=True):
            parameter.data = view
        self.current = copy

    def in_current(self, tensor: Tensor) -> Tensor:
        """Return the current copy's view where a tensor views another; other tensors unchanged."""
        if tensor.layout is not _STRIDED:
            return tensor
        address = tensor.data_ptr()
        index = bisect(self._edges, address)
        if not index & 1:  # after the end of a buffer, and before the begin of the next
            return tensor
        owner, buffer = self._owners[index >> 1]
        current = self.current
        if owner is current:
            return tensor
        # A plain tuple: this runs for every weight that each operation has saved.
        kind = tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()
        found = current.counterparts.get((address, *kind))
        if found is None:
            view = _View(address, *kind)
            found = current.view(buffer, address - self._edges[index - 1], view)
            current.counterparts[view] = found
        return found

    def _new_copy(self, buffers: Sequence[Tensor]) -> WeightCopy:
        rest = iter(buffers)
        of_groups = (each.views([next(rest) for _ in each.buffers]) for each in self._weights)
        copy = WeightCopy(buffers, [view for views in of_groups for view in views])
        for number, buffer in enumerate(buffers):
            begin = buffer.data_ptr()
            index = bisect(self._edges, begin)
            self._edges[index:index] = [begin, begin + buffer.numel() * buffer.element_size()]
            self._owners.insert(index // 2, (copy, number))
        return copy


def unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor
