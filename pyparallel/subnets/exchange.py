"""Handing out parts of the whole model and merging them again: pure overwrite, nothing averaged."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .collectives import SubnetCollectives
from .partition.tensor_cut import Block, Draw, TensorCut, block_of
from .placement import Placement


@dataclass(frozen=True)
class CutTensor:
    """A tensor on its way: this rank's rows of the whole, and its subnet's part.

    Args:
        name: of the parameter or buffer whose cut it has.
        rows: what this rank owns of it.
        part: what this rank's subnet has of it, in the same dtype.
    """

    name: str
    rows: Tensor
    part: Tensor


@dataclass(frozen=True)
class Assignment:
    """How one tensor is dealt out in a round, as one rank sees it.

    Args:
        owned: for each subnet, what it has of this rank's rows.
        held: for each owner, what this rank's subnet has of its rows.
    """

    owned: tuple[Block, ...]
    held: tuple[Block, ...]


Deals = Mapping[str, Assignment]


def assign(
    cuts: Mapping[str, TensorCut], draw: Draw, placement: Placement, members: SubnetCollectives
) -> dict[str, Assignment]:
    """How all tensors that are cut are dealt out, by name."""
    return {name: _deal_one(cut, draw, placement, members) for name, cut in cuts.items()}


class ShardExchange:
    """One collective each way and dtype; both ends know the order of entries from the draw.

    Args:
        members: the ranks.
    """

    def __init__(self, members: SubnetCollectives) -> None:
        self._members = members

    @torch.no_grad()
    def hand_out(self, items: Iterable[CutTensor], deals: Deals) -> None:
        """Write every subnet's part from the owners' rows."""
        for alike in _by_dtype(items):
            owned, held = self._blocks(alike, deals)
            pieces = [
                [block.take(item.rows) for item, block in zip(alike, blocks, strict=True)]
                for blocks in owned
            ]
            for blocks, values in zip(held, self._send(pieces, held), strict=True):
                for item, block, value in zip(alike, blocks, values, strict=True):
                    item.part[block.span].copy_(value)

    @torch.no_grad()
    def merge(self, items: Iterable[CutTensor], deals: Deals) -> None:
        """Write the owners' rows from every subnet's part; what no subnet has stays."""
        for alike in _by_dtype(items):
            owned, held = self._blocks(alike, deals)
            pieces = [
                [item.part[block.span] for item, block in zip(alike, blocks, strict=True)]
                for blocks in held
            ]
            for blocks, values in zip(owned, self._send(pieces, owned), strict=True):
                for item, block, value in zip(alike, blocks, values, strict=True):
                    block.put_(item.rows, value)

    def _blocks(self, items: Sequence[CutTensor], deals: Deals) -> tuple[list[list[Block]], ...]:
        """For each rank the blocks of all items: of this rank's rows, and of its subnet."""
        mine = [deals[item.name] for item in items]
        ranks = range(self._members.size)
        owned = [[each.owned[rank] for each in mine] for rank in ranks]
        return owned, [[each.held[rank] for each in mine] for rank in ranks]

    def _send(self, pieces: list[list[Tensor]], expected: list[list[Block]]) -> list[list[Tensor]]:
        """Send each rank its pieces; what comes from each, in the shapes of the blocks."""
        sizes = [[torch.Size(block.shape).numel() for block in blocks] for blocks in expected]
        sent = torch.cat([piece.reshape(-1) for theirs in pieces for piece in theirs])
        send = [sum(piece.numel() for piece in theirs) for theirs in pieces]
        received = self._members.exchange(sent, send, [sum(theirs) for theirs in sizes])
        flat = iter(received.split([size for theirs in sizes for size in theirs]))
        return [[next(flat).view(block.shape) for block in blocks] for blocks in expected]


def _deal_one(
    cut: TensorCut, draw: Draw, placement: Placement, members: SubnetCollectives
) -> Assignment:
    ranks = range(members.size)
    indices = [cut.indices(draw, subnet) for subnet in ranks]
    rows = [placement.rows(cut.shape[0], owner, members.size) for owner in ranks]
    return Assignment(
        owned=tuple(block_of(cut, indices[subnet], rows[members.rank]) for subnet in ranks),
        held=tuple(block_of(cut, indices[members.rank], rows[owner]) for owner in ranks),
    )


def _by_dtype(items: Iterable[CutTensor]) -> Iterator[list[CutTensor]]:
    groups: dict[torch.dtype, list[CutTensor]] = {}
    for item in items:
        groups.setdefault(item.part.dtype, []).append(item)
    yield from groups.values()
