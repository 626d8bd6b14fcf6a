"""Seconds per step of DDP and SGP, and how much communication SGP overlaps with compute."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gossip.models import Compute
from benchmarks.gossip.trainers import (
    ALONE,
    DDP,
    DDP_HALVED,
    OVERLAPPED,
    OVERLAPPED_CLOSURE,
    SGP,
    SGP_CLOSURE,
    RoundAlone,
)
from benchmarks.harness.turns import Training, time_blocks

METHODS = [ALONE, DDP, DDP_HALVED, SGP, OVERLAPPED]
WITH_CLOSURES = [ALONE, SGP, SGP_CLOSURE, OVERLAPPED, OVERLAPPED_CLOSURE]
ROUND_ALONE = "round alone"


@dataclass(frozen=True)
class Plan:
    """Number of turns, and of steps that every method takes in each."""

    turns: int
    steps: int


def measure(rank: int, compute: Compute, plan: Plan, closures: bool) -> dict[str, list[float]]:
    """Return the seconds per step of each method in each turn, on the slowest rank.

    Args:
        rank: of this process.
        compute: the model and inputs of a step.
        plan: how many turns and steps.
        closures: compare steps with closures and without, instead of with DDP.
    """
    methods = WITH_CLOSURES if closures else METHODS
    trainings: dict[str, Training] = {each.name: each.start(compute) for each in methods}
    trainings[ROUND_ALONE] = RoundAlone(compute)
    for training in trainings.values():  # connects and warms up
        training.step()
        training.finish()
    return time_blocks(trainings, plan.turns, plan.steps)


def hidden_fraction(seconds: Mapping[str, Sequence[float]], method: str) -> float:
    """Return the overlapped fraction of the shorter of communication and compute in a method."""
    names = (ROUND_ALONE, ALONE.name, method)
    communication, compute, both = (statistics.median(seconds[name]) for name in names)
    return (communication + compute - both) / min(communication, compute)
