"""Measurement of systems in turns within one run, in seconds per microbatch."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.pipeline.models import Model
from benchmarks.pipeline.systems import System, Training

WARM_UP = 2  # steps: the first connects, and may infer shapes


@dataclass(frozen=True)
class Plan:
    """The size of a measurement: in each turn, each system runs a block of steps.

    Args:
        turns: number of turns.
        microbatches: of a timed block.
    """

    turns: int
    microbatches: int


def start(systems: Sequence[System], model: Model, num_microbatches: int) -> dict[str, Training]:
    """Start each system, and warm it up."""
    trainings = {system.name: system.start(model, num_microbatches) for system in systems}
    for training in trainings.values():
        for _ in range(WARM_UP):
            training.step()
        training.finish()
    return trainings


def take_turns(
    trainings: Mapping[str, Training], num_microbatches: int, plan: Plan
) -> dict[str, list[float]]:
    """Return the seconds per microbatch in each turn, on the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    order = random.Random(0)  # the same on all ranks
    steps = max(1, plan.microbatches // num_microbatches)
    for _ in range(plan.turns):
        for name in order.sample(list(trainings), len(trainings)):
            seconds[name].append(time_block(trainings[name], steps) / num_microbatches)
    return {name: slowest(times) for name, times in seconds.items()}


def time_block(training: Training, steps: int) -> float:
    """Return the seconds per step in steady state, after a step of warm-up."""
    dist.barrier()
    training.step()
    begin = time.perf_counter()
    for _ in range(steps):
        training.step()
    elapsed = time.perf_counter() - begin
    training.finish()
    return elapsed / steps


def slowest(times: Sequence[float]) -> list[float]:
    """Return the elementwise maximum over ranks."""
    largest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()
