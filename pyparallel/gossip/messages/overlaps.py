"""Replicas of unequal numbers of shards: which rows of its shards a rank sends to which others."""

import math
from collections.abc import Sequence

from torch import Tensor

from ...training.shards import rows_of_shard


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

    def route(
        self, replicas: Sequence[int], messages: Sequence[Sequence[Tensor]]
    ) -> tuple[list[int], list[list[Tensor]], list[int]]:
        """Return the ranks of replicas to exchange messages with, of one flat tensor each.

        Of each rank also its parts of the message, views, and the place of its replica.
        """
        found = [
            (rank, [message.narrow(0, *each) for each in parts], place)
            for place, (replica, (message,)) in enumerate(zip(replicas, messages, strict=True))
            for rank, parts in self._links[replica]
        ]
        return [each[0] for each in found], [each[1] for each in found], [each[2] for each in found]


def _overlap(
    parameter: Tensor, offset: int, own: tuple[int, int], other: tuple[int, int]
) -> tuple[int, int] | None:
    """Return begin and length of what two shards, (index, number), both hold; None: nothing."""
    num_rows, *sizes = parameter.shape
    mine, theirs = (rows_of_shard(num_rows, *each) for each in (own, other))
    begin, end = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
    length = (end - begin) * math.prod(sizes)
    return (offset + (begin - mine.start) * math.prod(sizes), length) if length > 0 else None
