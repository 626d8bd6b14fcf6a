"""The GPipe schedule: all forwards, then all backwards."""

from collections.abc import Iterator
from dataclasses import dataclass

from .action import Kind
from .schedule import Flushing
from .shape import PipelineShape


@dataclass(frozen=True)
class GPipe(Flushing):
    """All forwards, then all backwards, then one update (Huang et al., NeurIPS 2019).

    With p stages on p ranks and m microbatches the bubble is (p - 1) / (m + p - 1), and each stage
    holds the activations of m microbatches. Several stages on a rank run breadth-first.
    """

    def order(self, shape: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        """Yield all forwards by stage, then all backwards from the last stage on."""
        for stage in shape.stages(rank):
            for microbatch in range(shape.num_microbatches):
                yield stage, Kind.FORWARD, microbatch
        for stage in reversed(shape.stages(rank)):
            for microbatch in range(shape.num_microbatches):
                yield stage, Kind.BACKWARD, microbatch
