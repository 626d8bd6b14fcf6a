"""Scattering parts of the full model to the subnets, merging them back, averaging the rest."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..comm import Collectives
from .partition.tensor_cut import Block, Draw, TensorCut, block_of
from .placement import Placement


@dataclass(frozen=True)
class CutTensor:
    """A tensor to exchange: the rows this rank owns of the full one, and its subnet's part."""

    name: str
    rows: Tensor
    part: Tensor


@dataclass(frozen=True)
class Assignment:
    """One tensor's blocks in a round, as seen by one rank."""

    owned: tuple[Block, ...]  # for each subnet, its block of this rank's rows
    held: tuple[Block, ...]  # for each owner, the block of its rows in this rank's subnet


Assignments = Mapping[str, Assignment]


def assign(
    cuts: Mapping[str, TensorCut], draw: Draw, placement: Placement, collectives: Collectives
) -> dict[str, Assignment]:
    """Return the assignment of every cut tensor, by name."""
    return {name: _assign_one(cut, draw, placement, collectives) for name, cut in cuts.items()}


@torch.no_grad()
def scatter(
    tensors: Iterable[CutTensor], assignments: Assignments, collectives: Collectives
) -> None:
    """Write every subnet's part from the owners' rows, with one all-to-all per dtype.

    No indices are sent: sender and receiver derive the order of the entries from the same draw.
    """
    for group in _by_dtype(tensors):
        owned, held = _blocks(group, assignments)
        pieces = [
            [block.take(tensor.rows) for tensor, block in zip(group, blocks, strict=True)]
            for blocks in owned
        ]
        for blocks, values in zip(held, _exchange(pieces, held, collectives), strict=True):
            for tensor, block, value in zip(group, blocks, values, strict=True):
                tensor.part[block.span].copy_(value)


@torch.no_grad()
def merge(
    tensors: Iterable[CutTensor],
    assignments: Assignments,
    collectives: Collectives,
    copies: int = 1,
) -> None:
    """Write the owners' rows from the subnets' parts; entries that no subnet has stay.

    So many neighboring ranks have copies of a subnet, which are averaged.
    """
    for group in _by_dtype(tensors):
        owned, held = _blocks(group, assignments)
        pieces = [
            [tensor.part[block.span] for tensor, block in zip(group, blocks, strict=True)]
            for blocks in held
        ]
        received = _exchange(pieces, owned, collectives)
        for first in range(0, len(owned), copies):
            of_copies = zip(*received[first : first + copies], strict=True)
            for tensor, block, values in zip(group, owned[first], of_copies, strict=True):
                block.put_(tensor.rows, _mean(torch.stack(values)) if copies > 1 else values[0])


def _assign_one(
    cut: TensorCut, draw: Draw, placement: Placement, collectives: Collectives
) -> Assignment:
    ranks = range(collectives.size)
    indices = [cut.indices(draw, subnet) for subnet in ranks]
    rows = [placement.rows(cut.shape[0], owner, collectives.size) for owner in ranks]
    return Assignment(
        owned=tuple(block_of(cut, indices[subnet], rows[collectives.rank]) for subnet in ranks),
        held=tuple(block_of(cut, indices[collectives.rank], rows[owner]) for owner in ranks),
    )


def _by_dtype(tensors: Iterable[CutTensor]) -> Iterator[list[CutTensor]]:
    groups: dict[torch.dtype, list[CutTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.part.dtype, []).append(tensor)
    yield from groups.values()


def _blocks(
    tensors: Sequence[CutTensor], assignments: Assignments
) -> tuple[list[tuple[Block, ...]], ...]:
    mine = [assignments[tensor.name] for tensor in tensors]
    owned = list(zip(*(each.owned for each in mine), strict=True))
    return owned, list(zip(*(each.held for each in mine), strict=True))


def _exchange(
    pieces: list[list[Tensor]], expected: Sequence[Sequence[Block]], collectives: Collectives
) -> list[list[Tensor]]:
    sizes = [[torch.Size(block.shape).numel() for block in blocks] for blocks in expected]
    sent = torch.cat([piece.reshape(-1) for theirs in pieces for piece in theirs])
    send = [sum(piece.numel() for piece in theirs) for theirs in pieces]
    received = collectives.all_to_all(sent, send, [sum(theirs) for theirs in sizes])
    flat = iter(received.split([size for theirs in sizes for size in theirs]))
    return [[next(flat).view(block.shape) for block in blocks] for blocks in expected]


@torch.no_grad()
def average(tensors: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
    """Return the average of each floating-point tensor over all ranks, in its dtype.

    The average of equal numbers is that number, bit for bit, which all-reduce does not ensure: each
    rank averages one part and sends it to all. The traffic is that of an all-reduce.
    """
    if collectives.size == 1:
        return list(tensors)
    averages: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = _average_flat(
            torch.cat([tensors[index].reshape(-1) for index in chosen]), collectives
        )
        pieces = flat.split([tensors[index].numel() for index in chosen])
        for index, piece in zip(chosen, pieces, strict=True):
            averages[index] = piece.view(tensors[index].shape)
    return [averages[index] for index in range(len(tensors))]


def _average_flat(flat: Tensor, collectives: Collectives) -> Tensor:
    bounds = [part * flat.numel() // collectives.size for part in range(collectives.size + 1)]
    lengths = [end - begin for begin, end in pairwise(bounds)]
    mine = [lengths[collectives.rank]] * collectives.size
    theirs = collectives.all_to_all(flat, lengths, mine).view(collectives.size, -1)
    return collectives.all_to_all(_mean(theirs).repeat(collectives.size), mine, lengths)


def _mean(rows: Tensor) -> Tensor:
    first = rows[0]
    wide = rows.to(torch.float32 if rows.dtype.itemsize < 4 else torch.float64)
    mean = wide[0] + (wide - wide[0]).sum(0) / len(rows)
    return torch.where((rows == first).all(0), first, mean.to(rows.dtype))
