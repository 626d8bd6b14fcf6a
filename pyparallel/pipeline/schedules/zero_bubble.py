"""Backward in two parts, the second of which fills the bubble."""

from collections.abc import Iterator
from dataclasses import dataclass

from .action import Kind
from .interleaved import backwards, forwards, warm_up
from .schedule import Flushing
from .shape import PipelineShape
from .versions import Live, Versions


@dataclass(frozen=True)
class ZeroBubble(Flushing):
    """ZB-H1 (Qi et al., ICLR 2024): the gradient of the weights waits until a rank would idle.

    The backward for the input alone is on the critical path; rank r puts off the other part by r
    microbatches. No more activations than 1F1B holds on its first stage. Several stages on a rank
    are interleaved.
    """

    def order(self, layout: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        """Forwards ahead, then a forward and both parts in turn, then what is left."""
        up, down = forwards(layout, rank), backwards(layout, rank)
        ahead, late = warm_up(layout, rank, per_hop=1), rank
        for stage, microbatch in up[:ahead]:
            yield stage, Kind.FORWARD, microbatch
        for index, (stage, microbatch) in enumerate(down):
            for place in up[ahead + index : ahead + index + 1]:
                yield place[0], Kind.FORWARD, place[1]
            yield stage, Kind.BACKWARD_INPUT, microbatch
            if index >= late:
                yield down[index - late][0], Kind.BACKWARD_WEIGHT, down[index - late][1]
        for stage, microbatch in down[max(0, len(down) - late) :]:
            yield stage, Kind.BACKWARD_WEIGHT, microbatch

    def versions(self, layout: PipelineShape) -> Versions:
        """No update falls between a forward and its backward."""
        return Live()
