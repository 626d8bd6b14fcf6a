"""Seconds per step of DDP, SGP and OSGP, and how much communication OSGP overlaps with compute."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.gossip.trainers import (
    ALONE,
    DDP,
    DDP_HALVED,
    OSGP,
    OSGP_CLOSURE,
    SGP,
    SGP_CLOSURE,
    Compute,
    Method,
    RoundAlone,
    Stepper,
)

METHODS = [ALONE, DDP, DDP_HALVED, SGP, OSGP]
WITH_CLOSURES = [ALONE, SGP, SGP_CLOSURE, OSGP, OSGP_CLOSURE]
ROUND_ALONE = "round alone"


@dataclass(frozen=True)
class Plan:
    """Number of turns, and of steps that every method takes in each."""

    turns: int
    steps: int


def measure(
    rank: int, compute: Compute, plan: Plan, methods: Sequence[Method] = METHODS
) -> dict[str, list[float]]:
    """Return the seconds per step of each method in each turn, on the slowest rank."""
    steppers: dict[str, Stepper] = {method.name: method.start(compute) for method in methods}
    steppers[ROUND_ALONE] = RoundAlone(compute)
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for stepper in steppers.values():  # connects and warms up
        stepper.step()
        stepper.finish()
    order = random.Random(0)  # the same on all ranks
    for _ in range(plan.turns):
        for name in order.sample(list(steppers), len(steppers)):
            seconds[name].append(time_block(steppers[name], plan.steps))
    return {name: slowest(times) for name, times in seconds.items()}


def time_block(stepper: Stepper, steps: int) -> float:
    """Return the seconds per step in steady state, after one step that is not timed."""
    dist.barrier()
    stepper.step()
    begin = time.perf_counter()
    for _ in range(steps):
        stepper.step()
    elapsed = time.perf_counter() - begin
    stepper.finish()
    return elapsed / steps


def slowest(times: Sequence[float]) -> list[float]:
    """Return the maximum over ranks of each entry."""
    largest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def hidden_fraction(seconds: Mapping[str, Sequence[float]], method: str = OSGP.name) -> float:
    """Return the overlapped fraction of the shorter of communication and compute in a method."""
    names = (ROUND_ALONE, ALONE.name, method)
    communication, compute, both = (statistics.median(seconds[name]) for name in names)
    return (communication + compute - both) / min(communication, compute)
