"""Handing out parts of the whole model and merging them again: pure overwrite, nothing averaged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .members import Members
from .placement import Placement
from .tensor_cut import Block, Draw, TensorCut, block_of


@dataclass(frozen=True)
class Item:
    """A tensor on its way: this rank's rows of the whole, and its subnet's part.

    Args:
        cut: how the tensor is cut.
        rows: what this rank owns of it.
        part: what this rank's subnet has of it, in the same dtype.
    """

    cut: TensorCut
    rows: Tensor
    part: Tensor


class Exchange:
    """One collective each way and dtype; both ends know the order of entries from the draw.

    Args:
        placement: who owns which rows.
        members: the ranks.
    """

    def __init__(self, placement: Placement, members: Members) -> None:
        self._placement = placement
        self._members = members

    @torch.no_grad()
    def hand_out(self, items: Iterable[Item], draw: Draw) -> None:
        """Write every subnet's part from the owners' rows."""
        for batch in self._batches(items, draw):
            batch.hand_out(self._members)

    @torch.no_grad()
    def merge(self, items: Iterable[Item], draw: Draw) -> None:
        """Write the owners' rows from every subnet's part; what no subnet has stays."""
        for batch in self._batches(items, draw):
            batch.merge(self._members)

    def _batches(self, items: Iterable[Item], draw: Draw) -> "Iterable[_Batch]":
        by_dtype: dict[torch.dtype, list[Item]] = {}
        for item in items:
            by_dtype.setdefault(item.part.dtype, []).append(item)
        for alike in by_dtype.values():
            yield _Batch(alike, draw, self._placement, self._members)


class _Batch:
    """Items of one dtype, and for each rank what of them it has in common with this one."""

    def __init__(
        self, items: Sequence[Item], draw: Draw, placement: Placement, members: Members
    ) -> None:
        self._items = items
        self._owned: list[list[Block]] = [[] for _ in range(members.size)]
        self._parts: list[list[Block]] = [[] for _ in range(members.size)]
        for item in items:
            indices = [item.cut.indices(draw, subnet) for subnet in range(members.size)]
            for peer in range(members.size):
                mine, theirs = (
                    placement.rows(item.cut.shape[0], owner, members.size)
                    for owner in (members.rank, peer)
                )
                self._owned[peer].append(block_of(item.cut, indices[peer], mine))
                self._parts[peer].append(block_of(item.cut, indices[members.rank], theirs))

    def hand_out(self, members: Members) -> None:
        pieces = [
            [block.take(item.rows) for item, block in zip(self._items, blocks, strict=True)]
            for blocks in self._owned
        ]
        received = self._exchange(members, pieces, self._parts)
        for blocks, values in zip(self._parts, received, strict=True):
            for item, block, value in zip(self._items, blocks, values, strict=True):
                item.part[block.span].copy_(value)

    def merge(self, members: Members) -> None:
        pieces = [
            [item.part[block.span] for item, block in zip(self._items, blocks, strict=True)]
            for blocks in self._parts
        ]
        received = self._exchange(members, pieces, self._owned)
        for blocks, values in zip(self._owned, received, strict=True):
            for item, block, value in zip(self._items, blocks, values, strict=True):
                block.put_(item.rows, value)

    def _exchange(
        self, members: Members, pieces: list[list[Tensor]], expected: list[list[Block]]
    ) -> list[list[Tensor]]:
        sizes = [[torch.Size(block.shape).numel() for block in blocks] for blocks in expected]
        sent = torch.cat([piece.reshape(-1) for theirs in pieces for piece in theirs])
        send = [sum(piece.numel() for piece in theirs) for theirs in pieces]
        received = members.exchange(sent, send, [sum(theirs) for theirs in sizes])
        flat = iter(received.split([size for theirs in sizes for size in theirs]))
        return [[next(flat).view(block.shape) for block in blocks] for blocks in expected]
