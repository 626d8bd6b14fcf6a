"""Replicas of unequal numbers of shards: which rows of its shards a rank sends to which others."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...compression import BufferLayout, Piece
from ...compression.layout import Entries
from ...training.shards import rows_of_shard


class Overlap(NamedTuple):
    """The rows of a flat tensor that one rank of each replica holds.

    With a compressor that is what is encoded by itself: once, with one state on the rank that sends
    it, for all replicas that receive it.

    Args:
        holders: these ranks, by replica.
        entries: where this rank has the rows in its tensor.
    """

    holders: tuple[int, ...]
    entries: Entries


class Overlaps:
    """What a flat tensor of this rank, and those of the ranks of other replicas, both hold.

    A pair of ranks exchanges a header, and the rows that both have of each parameter: views, as
    long on the sender as on the receiver. Also where a rank holds nothing, every rank of a replica
    gets a header from one of each replica, and so the mass of its message.

    Args:
        replicas: the ranks that hold each replica, in the order of their shards.
        rank: this one.
        parameters: what the tensor holds shards of, each with its offset; in shards of the first
            dimension, and of the same shapes in the same order in all replicas.

    Attributes:
        replica: the index of this rank's replica.
        numel: elements of the parameters, those on other ranks included.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[int]],
        rank: int,
        parameters: Sequence[tuple[Tensor, int]],
    ) -> None:
        self.numel = sum(p.numel() for p, _ in parameters)
        self.replica = next(i for i, ranks in enumerate(replicas) if rank in ranks)
        own = replicas[self.replica]
        place, size = own.index(rank), len(own)
        self._replicas, self._place, self._parameters = replicas, place, parameters
        self._links: list[list[tuple[int, list[tuple[int, int]]]]] = []
        for ranks in replicas:
            links = []
            for index, each in enumerate(ranks):
                parts = [
                    part
                    for p, offset in parameters
                    if (part := _overlap(p, offset, (place, size), (index, len(ranks))))
                ]
                # Of a tensor of very many rows the two would have some in common.
                if parts or (place * len(ranks) < (index + 1) * size
                             and index * size < (place + 1) * len(ranks)):  # fmt: skip
                    links.append((each, parts))
            self._links.append(links)

    def split(self, layout: BufferLayout) -> list[Overlap]:
        """Return the overlaps of a tensor of this layout, in an order that all ranks have.

        A rank without rows has one without entries, which nobody else holds.
        """
        wholes = dict(zip(layout.offsets, layout.pieces, strict=True))
        found: dict[tuple[int, ...], list[tuple[Piece, int]]] = {}
        for p, offset in self._parameters:
            num_rows, *sizes = p.shape
            first = rows_of_shard(num_rows, self._place, len(self._replicas[self.replica])).start
            for holders, rows in self._cut(num_rows if math.prod(sizes) else 0):
                name = wholes[offset].name
                part = f"rows {rows.start} to {rows.stop - 1} of {name}"
                piece = Piece(part, (len(rows), *sizes), name)
                begin = offset + (rows.start - first) * math.prod(sizes)
                found.setdefault(holders, []).append((piece, begin))
        if not found:
            return [Overlap((-1,) * len(self._replicas), Entries.of((), ()))]
        ordered = sorted(found.items())
        return [
            Overlap(holders, Entries.of(*zip(*parts, strict=True))) for holders, parts in ordered
        ]

    def route(
        self,
        replicas: Sequence[int],
        messages: Sequence[Sequence[Any]],
        overlaps: Sequence[Overlap] | None = None,
    ) -> tuple[list[int], list[list[Tensor]], list[int]]:
        """Return the ranks of replicas to exchange messages with, of one flat tensor each.

        Of each rank also its parts of the message, views, and the place of its replica. With
        ``overlaps`` a message has the encoded tensors of each of them.
        """
        found = []
        for place, (replica, message) in enumerate(zip(replicas, messages, strict=True)):
            for rank, parts in self._links[replica]:
                if overlaps is None:
                    tensors = [message[0].narrow(0, *each) for each in parts]
                else:
                    pairs = zip(overlaps, message, strict=True)
                    ours = (m for overlap, m in pairs if overlap.holders[replica] == rank)
                    tensors = [tensor for each in ours for tensor in each]
                found.append((rank, tensors, place))
        return [each[0] for each in found], [each[1] for each in found], [each[2] for each in found]

    def _cut(self, num_rows: int) -> Iterator[tuple[tuple[int, ...], range]]:
        """Yield the rows of this rank that the same ranks of all replicas hold, and these ranks."""
        lengths = [-(-num_rows // len(ranks)) for ranks in self._replicas]
        mine = rows_of_shard(num_rows, self._place, len(self._replicas[self.replica]))
        begin = mine.start
        while begin < mine.stop:
            places = [begin // length for length in lengths]
            ends = [(at + 1) * length for at, length in zip(places, lengths, strict=True)]
            end = min(mine.stop, *ends)
            yield (
                tuple(r[at] for r, at in zip(self._replicas, places, strict=True)),
                range(begin, end),
            )
            begin = end


def _overlap(
    parameter: Tensor, offset: int, own: tuple[int, int], other: tuple[int, int]
) -> tuple[int, int] | None:
    """Return begin and length of what two shards, (index, number), both hold; None: nothing."""
    num_rows, *sizes = parameter.shape
    mine, theirs = (rows_of_shard(num_rows, *each) for each in (own, other))
    begin, end = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
    length = (end - begin) * math.prod(sizes)
    return (offset + (begin - mine.start) * math.prod(sizes), length) if length > 0 else None
