"""The zero-bubble schedule ZB-H1: the backward is split, and its weight part fills the bubble."""

from collections.abc import Iterator
from dataclasses import dataclass

from .action import Kind
from .interleaved import backwards, forwards, warm_up
from .schedule import Flushing
from .shape import PipelineShape


@dataclass(frozen=True)
class ZeroBubble(Flushing):
    """ZB-H1 (Qi et al., ICLR 2024): the backward of the weights is delayed into idle time.

    Only the backward of the input is on the critical path; rank r delays that of the weights by r
    microbatches. No stage holds more activations than the first stage in 1F1B. Several stages on a
    rank are interleaved.
    """

    def order(self, shape: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        """Yield the warm-up forwards, then 1F1B with split backwards, then the rest."""
        forward_order, backward_order = forwards(shape, rank), backwards(shape, rank)
        num_warm_up, delay = warm_up(shape, rank, per_hop=1), rank
        for stage, microbatch in forward_order[:num_warm_up]:
            yield stage, Kind.FORWARD, microbatch
        for index, (stage, microbatch) in enumerate(backward_order):
            following = num_warm_up + index
            for forward in forward_order[following : following + 1]:
                yield forward[0], Kind.FORWARD, forward[1]
            yield stage, Kind.BACKWARD_INPUT, microbatch
            if index >= delay:
                delayed = backward_order[index - delay]
                yield delayed[0], Kind.BACKWARD_WEIGHT, delayed[1]
        for stage, microbatch in backward_order[max(0, len(backward_order) - delay) :]:
            yield stage, Kind.BACKWARD_WEIGHT, microbatch
