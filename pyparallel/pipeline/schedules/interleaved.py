"""Several stages on each rank in 1F1B order, and the order it shares with the zero bubble."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .action import Kind
from .schedule import Flushing
from .shape import PipelineShape
from .versions import Live, Versions

Place = tuple[int, int]  # stage, microbatch


def rounds(layout: PipelineShape) -> list[range]:
    """The microbatches in groups as even as can be, of ``num_ranks`` or more where there are."""
    count = max(1, layout.num_microbatches // layout.num_ranks)
    edges = [layout.num_microbatches * i // count for i in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(edges)]


def forwards(layout: PipelineShape, rank: int) -> list[Place]:
    """Round by round, and in each round stage by stage, upwards."""
    stages = layout.stages(rank)
    return [(stage, m) for group in rounds(layout) for stage in stages for m in group]


def backwards(layout: PipelineShape, rank: int) -> list[Place]:
    """Round by round, and in each round stage by stage, downwards."""
    stages = layout.stages(rank)
    return [(stage, m) for group in rounds(layout) for stage in reversed(stages) for m in group]


def warm_up(layout: PipelineShape, rank: int, per_hop: int) -> int:
    """How many forwards a rank runs before its first backward, less the one just before it."""
    ahead = (layout.stages_per_rank - 1) * max(map(len, rounds(layout)))
    ahead += per_hop * (layout.num_ranks - 1 - rank)
    return min(ahead, layout.num_microbatches * layout.stages_per_rank)


@dataclass(frozen=True)
class Interleaved(Flushing):
    """1F1B with v stages on each of p ranks (Narayanan et al., SC 2021).

    With m microbatches, p dividing m, the bubble is (p - 1) / (v m + p - 1). Other numbers of
    microbatches run in rounds of unequal length.
    """

    def order(self, layout: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        """Forwards ahead, then a forward and a backward in turn, then the backwards left."""
        up, down = forwards(layout, rank), backwards(layout, rank)
        ahead = warm_up(layout, rank, per_hop=2)
        for stage, microbatch in up[:ahead]:
            yield stage, Kind.FORWARD, microbatch
        for index, (stage, microbatch) in enumerate(down):
            for place in up[ahead + index : ahead + index + 1]:
                yield place[0], Kind.FORWARD, place[1]
            yield stage, Kind.BACKWARD, microbatch

    def versions(self, layout: PipelineShape) -> Versions:
        """No update falls between a forward and its backward."""
        return Live()
