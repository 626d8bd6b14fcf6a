"""One forward, one backward (1F1B): the order, and the schedule that flushes after it."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from .action import Kind
from .schedule import Flushing
from .shape import PipelineShape
from .versions import Live, Versions

Slot = tuple[int, int, Kind, int]  # when, stage, kind, microbatch


def slots(layout: PipelineShape, stage: int, microbatches: range) -> Iterator[Slot]:
    """What a stage computes from the forward of the first microbatch to just before the next one's.

    On an ideal clock with forward and backward of one tick each, stage s of D has the forward of
    microbatch m at tick s + 2 m and its backward at tick 2 D - 1 - s + 2 m. Never two at once, and
    whatever an action waits for comes a tick before it. So stages sorted by this clock may share a
    rank, and a stream may be cut before any microbatch, without a deadlock.
    """
    warm_up = layout.num_stages - 1 - stage
    for microbatch in microbatches:
        yield stage + 2 * microbatch, stage, Kind.FORWARD, microbatch
        if microbatch >= warm_up:
            yield _backward_slot(layout, stage, microbatch - warm_up)


def pending_backwards(layout: PipelineShape, stage: int, total: int) -> Iterator[Slot]:
    """The backwards that are left of so many microbatches once all forwards have run."""
    warm_up = layout.num_stages - 1 - stage
    for microbatch in range(max(0, total - warm_up), total):
        yield _backward_slot(layout, stage, microbatch)


def _backward_slot(layout: PipelineShape, stage: int, microbatch: int) -> Slot:
    tick = 2 * layout.num_stages - 1 - stage + 2 * microbatch
    return tick, stage, Kind.BACKWARD, microbatch


def in_order(stages: list[Iterator[Slot]]) -> Iterator[tuple[int, Kind, int]]:
    """The slots of a rank's stages on one clock: stage, kind and microbatch."""
    merged = stages[0] if len(stages) == 1 else heapq.merge(*stages)
    return (slot[1:] for slot in merged)


@dataclass(frozen=True)
class OneForwardOneBackward(Flushing):
    """1F1B with a flush (PipeDream-Flush; Narayanan et al., ICML 2021).

    Gradients and bubble of GPipe, but stage s of D holds min(D - s, microbatches) activations.
    """

    def order(self, layout: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        """Fill, alternate, drain."""
        fed, total = range(layout.num_microbatches), layout.num_microbatches
        stages = layout.stages(rank)
        return in_order(
            [
                chain(slots(layout, each, fed), pending_backwards(layout, each, total))
                for each in stages
            ]
        )

    def versions(self, layout: PipelineShape) -> Versions:
        """No update falls between a forward and its backward."""
        return Live()
