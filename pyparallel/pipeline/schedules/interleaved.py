"""Interleaved 1F1B, and the orders that it shares with ``ZeroBubble``."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from typing_extensions import override

from .action import Kind
from .schedule import Flushing
from .shape import PipelineShape

StageMicrobatch = tuple[int, int]


def rounds(shape: PipelineShape) -> list[range]:
    """Split the microbatches into even rounds, of at least ``num_ranks`` if there are enough."""
    count = max(1, shape.num_microbatches // shape.num_ranks)
    edges = [shape.num_microbatches * i // count for i in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(edges)]


def forwards(shape: PipelineShape, rank: int) -> list[StageMicrobatch]:
    """Return the forwards of a rank: round by round, and in each round stage by stage."""
    stages = shape.stages(rank)
    return [(stage, m) for group in rounds(shape) for stage in stages for m in group]


def backwards(shape: PipelineShape, rank: int) -> list[StageMicrobatch]:
    """Return the backwards of a rank: round by round, and in each round from the last stage."""
    stages = shape.stages(rank)
    return [(stage, m) for group in rounds(shape) for stage in reversed(stages) for m in group]


def warm_up(shape: PipelineShape, rank: int, per_hop: int) -> int:
    """Return the number of forwards in a rank's warm-up, before its first 1F1B pair."""
    num_forwards = (shape.stages_per_rank - 1) * max(map(len, rounds(shape)))
    num_forwards += per_hop * (shape.num_ranks - 1 - rank)
    return min(num_forwards, shape.num_microbatches * shape.stages_per_rank)


def forwards_and_backwards(
    shape: PipelineShape, rank: int, per_hop: int, backward: Kind
) -> Iterator[tuple[int, Kind, int]]:
    """Yield the warm-up forwards, then 1F1B, then the remaining backwards."""
    forward_order, backward_order = forwards(shape, rank), backwards(shape, rank)
    num_warm_up = warm_up(shape, rank, per_hop)
    for stage, microbatch in forward_order[:num_warm_up]:
        yield stage, Kind.FORWARD, microbatch
    later = forward_order[num_warm_up:]
    for forward, (stage, microbatch) in zip_longest(later, backward_order):
        if forward is not None:
            yield forward[0], Kind.FORWARD, forward[1]
        yield stage, backward, microbatch


@dataclass(frozen=True)
class Interleaved(Flushing):
    """1F1B with v stages on each of p ranks (Narayanan et al., SC 2021).

    With m microbatches, m a multiple of p, the bubble is (p - 1) / (v m + p - 1). Other numbers of
    microbatches run in rounds of unequal length.
    """

    interleaves = True

    @override
    def order(self, shape: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        return forwards_and_backwards(shape, rank, 2, Kind.BACKWARD)
