"""The idle time of ranks in pipelines whose stages sleep: measured and simulated."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from benchmarks.pipeline.models import SleepingModel
from benchmarks.pipeline.systems import System, copies_by_stage
from benchmarks.pipeline.turns import Plan, start, take_turns
from pyparallel.pipeline import Action, simulate

Actions = Sequence[Sequence[Action]]


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
    """Measure all systems in turns."""
    trainings = start(systems, model, num_microbatches)
    seconds = take_turns(trainings, num_microbatches, plan)
    return {
        name: Waiting(
            seconds[name],
            simulated_seconds(training.actions, model) / num_microbatches,
            copies_by_stage(training),
        )
        for name, training in trainings.items()
    }


def simulated_seconds(actions: Callable[[int], Actions], model: SleepingModel) -> float:
    """Return the simulated time of a step in steady state: what one more step adds."""
    few = 4  # more than the warm-up takes, with at least as many microbatches as stages
    times = [simulate_steps(actions(steps), model) for steps in (few, few + 1)]
    return times[1] - times[0]


def simulate_steps(actions: Actions, model: SleepingModel) -> float:
    """Return the simulated seconds of the actions, from an empty pipeline to an empty pipeline."""
    num_stages = 1 + max(action.stage for action in chain.from_iterable(actions))
    return simulate(actions, model.costs(num_stages)).makespan
