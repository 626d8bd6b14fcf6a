"""The effect of stragglers on other ranks: steps sleep, some of them three times as long."""

import random
import time
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.gossip.models import RealCompute
from benchmarks.gossip.trainers import ADPSGD, DDP, OVERLAPPED, OVERLAPPED_4, SGP, Training

METHODS = [DDP, SGP, OVERLAPPED, OVERLAPPED_4, ADPSGD]
SLOWER, SLOW_RANK, PROBABILITY = 3, 3, 0.1
MODEL = RealCompute(layers=2, width=64, batch=8)
EVEN, ONE_SLOW = "no straggler", "one rank 3 times slower"
AT_RANDOM = "each step 3 times longer with probability 1/10"
SCENARIOS = [EVEN, ONE_SLOW, AT_RANDOM]


def factor(scenario: str, rank: int, turn: int, step: int) -> int:
    """Return how many times longer a step takes; the same steps for all methods."""
    chance = random.Random(f"{turn} {rank} {step}").random()
    is_slow = {
        EVEN: False,
        ONE_SLOW: rank == SLOW_RANK,
        AT_RANDOM: chance < PROBABILITY,
    }
    return SLOWER if is_slow[scenario] else 1


@dataclass(frozen=True)
class Plan:
    """Numbers of turns and steps, and the duration of a step.

    Args:
        lead: steps before timing starts, until fast ranks are as far ahead as they can get.
        seconds: duration of a step's sleep.
    """

    turns: int
    lead: int
    steps: int
    seconds: float


def measure(rank: int, plan: Plan) -> dict[tuple[str, str], list[float]]:
    """Return this rank's seconds per step by method and scenario, one entry for each turn.

    The rank that is always slow is left out of its scenario.
    """
    trainings = {method.name: method.start(MODEL) for method in METHODS}
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(plan.turns):
        for scenario in SCENARIOS:
            for name, training in trainings.items():
                elapsed = time_steps(training, scenario, rank, turn, plan)
                if (scenario, rank) != (ONE_SLOW, SLOW_RANK):
                    seconds.setdefault((name, scenario), []).append(elapsed)
    return seconds


def time_steps(training: Training, scenario: str, rank: int, turn: int, plan: Plan) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for step in range(plan.lead + plan.steps):
        if step == plan.lead:
            begin = time.perf_counter()
        time.sleep(plan.seconds * factor(scenario, rank, turn, step))
        training.step()
    elapsed = time.perf_counter() - begin
    training.finish()
    return elapsed / plan.steps
