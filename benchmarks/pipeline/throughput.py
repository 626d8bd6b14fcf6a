"""Seconds per microbatch of a model, with one core per stage."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.pipeline.limit import Limit
from benchmarks.pipeline.models import Model
from benchmarks.pipeline.systems import ADAMW, System, copies_by_stage
from benchmarks.pipeline.turns import Plan, start, take_turns


class Speed(NamedTuple):
    """The measurements of one system.

    Args:
        seconds: per microbatch in each turn, on the slowest rank.
        weight_copies: peak number of each stage; empty: not counted.
    """

    seconds: list[float]
    weight_copies: list[int]


def measure(
    rank: int,
    model: Model,
    systems: Sequence[System],
    num_microbatches: int,
    plan: Plan,
    optimizer: str = ADAMW,
) -> dict[str, Speed]:
    """Measure all systems in turns, and the limit with an optimizer of this class."""
    pipelines = start(systems, model, num_microbatches)
    limit = start([Limit(optimizer)], model, num_microbatches)
    seconds = take_turns(limit | pipelines, num_microbatches, plan)
    return {
        name: Speed(times, copies_by_stage(pipelines[name]) if name in pipelines else [])
        for name, times in seconds.items()
    }
