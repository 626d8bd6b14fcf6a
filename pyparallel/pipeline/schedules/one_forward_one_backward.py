"""One forward, one backward (1F1B): the order, and the schedule with a flush in each step."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .action import Kind
from .schedule import Flushing
from .shape import PipelineShape

Slot = tuple[int, int, Kind, int]  # tick, stage, kind, microbatch


def slots(
    shape: PipelineShape, stage: int, microbatches: range, *, drains: bool = False
) -> Iterator[Slot]:
    """Yield a stage's slots from the forward of the first microbatch to just before the next step.

    ``drains``: and the backwards that remain then. Of an empty range they are all that there is.
    On an ideal clock stage s of D has the forward of microbatch m at tick s + 2 m and its backward
    at tick 2 D - 1 - s + 2 m, and inputs are ready a tick before. So stages sorted by this clock
    can share a rank, and the sequence can be cut before any microbatch, without a deadlock.
    """
    warm_up = shape.num_stages - 1 - stage
    for microbatch in range(microbatches.start, microbatches.stop + drains * warm_up):
        tick = stage + 2 * microbatch
        if microbatch < microbatches.stop:
            yield tick, stage, Kind.FORWARD, microbatch
        if microbatch >= warm_up:
            yield tick + 1, stage, Kind.BACKWARD, microbatch - warm_up


def in_order(stages: Sequence[Iterable[Slot]]) -> Iterator[tuple[int, Kind, int]]:
    """Merge the slots of a rank's stages by tick, as (stage, kind, microbatch)."""
    merged = stages[0] if len(stages) == 1 else heapq.merge(*stages)
    return (slot[1:] for slot in merged)


def one_flush(
    shape: PipelineShape, rank: int, num_microbatches: int
) -> Iterator[tuple[int, Kind, int]]:
    """Yield the warm-up forwards, the steady state and the cool-down backwards of a rank."""
    microbatches = range(num_microbatches)
    return in_order([slots(shape, each, microbatches, drains=True) for each in shape.stages(rank)])


@dataclass(frozen=True)
class OneForwardOneBackward(Flushing):
    """1F1B with a flush (PipeDream-Flush; Narayanan et al., ICML 2021).

    Gradients and bubble are GPipe's, but stage s of D holds the activations of only
    min(D - s, microbatches) microbatches.
    """

    def order(self, shape: PipelineShape, rank: int) -> Iterator[tuple[int, Kind, int]]:
        """Yield a flush of all microbatches."""
        return one_flush(shape, rank, shape.num_microbatches)
