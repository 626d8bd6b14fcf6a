"""The zero-bubble schedule ZB-H1: the backward is split, and its weight part fills the bubble."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from .action import Kind
from .interleaved import forwards_and_backwards
from .schedule import Flushing
from .shape import PipelineShape


@dataclass(frozen=True)
class ZeroBubble(Flushing):
    """ZB-H1 (Qi et al., ICLR 2024): the backward of the weights is delayed into idle time.

    Only the backward of the input is on the critical path; rank r delays that of the weights by r
    microbatches. No stage holds more activations than the first stage in 1F1B. Several stages on a
    rank are interleaved.
    """

    @override
    def order(self, shape: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        delayed: deque[tuple[int, int]] = deque()
        for action in forwards_and_backwards(shape, rank, 1, Kind.BACKWARD_INPUT):
            yield action
            if action[1] is Kind.BACKWARD_INPUT:
                delayed.append((action[0], action[2]))
                if len(delayed) > rank:
                    stage, microbatch = delayed.popleft()
                    yield stage, Kind.BACKWARD_WEIGHT, microbatch
        for stage, microbatch in delayed:
            yield stage, Kind.BACKWARD_WEIGHT, microbatch
