"""The idle time of ranks in pipelines whose stages sleep: measured and simulated."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from benchmarks.pipeline.models import SleepingModel
from benchmarks.pipeline.systems import Plan, System, copies_by_stage, start, time_microbatches
from pyparallel.pipeline import Action, simulate


class Waiting(NamedTuple):
    """The measurements of one system.

    Args:
        seconds: per microbatch in each turn, on the slowest rank.
        simulated: the same by the simulator.
        weight_copies: peak number of each stage; empty: not counted.
    """

    seconds: list[float]
    simulated: float
    weight_copies: list[int]


def measure(
    rank: int, model: SleepingModel, systems: Sequence[System], num_microbatches: int, plan: Plan
) -> dict[str, Waiting]:
    trainings = start(systems, model, num_microbatches)
    seconds = time_microbatches(trainings, num_microbatches, plan)
    return {
        name: Waiting(
            seconds[name],
            simulated_seconds(training.actions, model) / num_microbatches,
            copies_by_stage(training),
        )
        for name, training in trainings.items()
    }


def simulated_seconds(
    actions: Callable[[int], Sequence[Sequence[Action]]], model: SleepingModel
) -> float:
    """Return the simulated time of a step in steady state: what one more step adds."""
    few = 4  # more than the warm-up takes, with at least as many microbatches as stages
    fewer, more = actions(few), actions(few + 1)
    costs = model.costs(1 + max(action.stage for action in chain.from_iterable(fewer)))
    return simulate(more, costs).makespan - simulate(fewer, costs).makespan
