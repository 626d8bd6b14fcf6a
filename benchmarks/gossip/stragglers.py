"""What slow ranks cost the others: steps that sleep, some of them three times as long."""

import random
import time
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from benchmarks.gossip.models import RealCompute
from benchmarks.gossip.trainers import ADPSGD, DDP, OSGP, OSGP_4, SGP, Training

METHODS = [DDP, SGP, OSGP, OSGP_4, ADPSGD]
SLOWER = 3
MODEL = RealCompute(layers=2, width=64, batch=8)


class Scenario(Protocol):
    """Who is slow, and when."""

    @property
    def name(self) -> str:
        """As it stands in the table."""

    def factor(self, rank: int, turn: int, step: int) -> int:
        """How many times longer the step takes."""

    def counts(self, rank: int) -> bool:
        """Whether this rank's speed is asked for."""


@dataclass(frozen=True)
class Even:
    """All ranks are equally fast."""

    name: str = "no straggler"

    def factor(self, rank: int, turn: int, step: int) -> int:
        """Always 1."""
        return 1

    def counts(self, rank: int) -> bool:
        """All."""
        return True


@dataclass(frozen=True)
class OneSlow:
    """The last of four ranks is always slow; the others' speed counts."""

    name: str = "one rank 3 times slower"
    slow: int = 3

    def factor(self, rank: int, turn: int, step: int) -> int:
        """By the rank."""
        return SLOWER if rank == self.slow else 1

    def counts(self, rank: int) -> bool:
        """The others."""
        return rank != self.slow


@dataclass(frozen=True)
class AtRandom:
    """Each step of each rank is slow with probability 1/10; the same ones for all methods."""

    name: str = "each step 3 times longer with probability 1/10"
    probability: float = 0.1

    def factor(self, rank: int, turn: int, step: int) -> int:
        """By a number drawn for this step."""
        chance = random.Random(f"{turn} {rank} {step}").random()
        return SLOWER if chance < self.probability else 1

    def counts(self, rank: int) -> bool:
        """All."""
        return True


SCENARIOS: list[Scenario] = [Even(), OneSlow(), AtRandom()]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        lead: steps before the clock starts, until fast ranks are as far ahead as they can get.
        seconds: what a step sleeps.
    """

    turns: int
    lead: int
    steps: int
    seconds: float


def measure(rank: int, plan: Plan) -> dict[tuple[str, str], list[float]]:
    """Seconds per step of this rank, by method and scenario, one entry a turn.

    Empty where the speed of this rank does not count.
    """
    trainings = {method.name: method.start(MODEL) for method in METHODS}
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(plan.turns):
        for scenario in SCENARIOS:
            for name, training in trainings.items():
                elapsed = time_steps(training, scenario, rank, turn, plan)
                if scenario.counts(rank):
                    seconds.setdefault((name, scenario.name), []).append(elapsed)
    return seconds


def time_steps(training: Training, scenario: Scenario, rank: int, turn: int, plan: Plan) -> float:
    """Seconds per step of this rank."""
    dist.barrier()
    begin = time.perf_counter()
    for step in range(plan.lead + plan.steps):
        if step == plan.lead:
            begin = time.perf_counter()
        time.sleep(plan.seconds * scenario.factor(rank, turn, step))
        training.step()
    elapsed = time.perf_counter() - begin
    training.finish()
    return elapsed / plan.steps
