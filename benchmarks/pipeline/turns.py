"""Systems take turns within one run: seconds per microbatch of each in every turn."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.pipeline.models import Model
from benchmarks.pipeline.systems import System, Training

WARM_UP = 2  # calls: the first connects, and may infer shapes


@dataclass(frozen=True)
class Plan:
    """How much is measured: in every turn, every system takes a block of calls.

    Args:
        microbatches: of a block that is timed, in as many calls as they fill.
    """

    turns: int
    microbatches: int


def start(systems: Sequence[System], model: Model, num_microbatches: int) -> dict[str, Training]:
    """Begin with each, and warm it up."""
    trainings = {system.name: system.start(model, num_microbatches) for system in systems}
    for training in trainings.values():
        for _ in range(WARM_UP):
            training.step()
        training.finish()
    return trainings


def take_turns(
    trainings: Mapping[str, Training], num_microbatches: int, plan: Plan
) -> dict[str, list[float]]:
    """Seconds per microbatch in each turn, on the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    order = random.Random(0)  # the same on all ranks
    calls = max(1, plan.microbatches // num_microbatches)
    for _ in range(plan.turns):
        for name in order.sample(list(trainings), len(trainings)):
            seconds[name].append(time_block(trainings[name], calls) / num_microbatches)
    return {name: slowest(times) for name, times in seconds.items()}


def time_block(training: Training, calls: int) -> float:
    """Seconds per call in the steady state: a call before has filled the pipe."""
    dist.barrier()
    training.step()
    begin = time.perf_counter()
    for _ in range(calls):
        training.step()
    elapsed = time.perf_counter() - begin
    training.finish()
    return elapsed / calls


def slowest(times: Sequence[float]) -> list[float]:
    """The largest among the ranks, entry by entry."""
    largest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()
