"""All forwards, then all backwards."""

from collections.abc import Iterator
from dataclasses import dataclass

from .action import Kind
from .schedule import Flushing
from .shape import PipelineShape
from .versions import Live, Versions


@dataclass(frozen=True)
class GPipe(Flushing):
    """All forwards, then all backwards, then one update (Huang et al., NeurIPS 2019).

    With p stages on p ranks and m microbatches the bubble is (p - 1) / (m + p - 1), and every stage
    holds m activations. Several stages on a rank run breadth-first.
    """

    def order(self, layout: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        """Stages upwards, then downwards; microbatches ascending both times."""
        for stage in layout.stages(rank):
            for microbatch in range(layout.num_microbatches):
                yield stage, Kind.FORWARD, microbatch
        for stage in reversed(layout.stages(rank)):
            for microbatch in range(layout.num_microbatches):
                yield stage, Kind.BACKWARD, microbatch

    def versions(self, layout: PipelineShape) -> Versions:
        """No update falls between a forward and its backward."""
        return Live()
