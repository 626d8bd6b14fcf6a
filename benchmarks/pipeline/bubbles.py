"""How much of their time ranks wait, in pipelines whose stages sleep: measured, and on paper."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from benchmarks.pipeline.models import SleepingModel
from benchmarks.pipeline.systems import System, copies_by_stage
from benchmarks.pipeline.turns import Plan, start, take_turns
from pyparallel.pipeline import Action, simulate

Actions = Sequence[Sequence[Action]]


class Waiting(NamedTuple):
    """Of one system.

    Args:
        seconds: per microbatch in each turn, on the slowest rank.
        on_paper: the same by the simulator.
        weight_copies: the most that each stage has held at once; empty: not counted.
    """

    seconds: list[float]
    on_paper: float
    weight_copies: list[int]


def measure(
    rank: int, model: SleepingModel, systems: Sequence[System], num_microbatches: int, plan: Plan
) -> dict[str, Waiting]:
    """All systems in turns."""
    trainings = start(systems, model, num_microbatches)
    seconds = take_turns(trainings, num_microbatches, plan)
    return {
        name: Waiting(
            seconds[name],
            seconds_on_paper(training.actions, model) / num_microbatches,
            copies_by_stage(training),
        )
        for name, training in trainings.items()
    }


def seconds_on_paper(actions: Callable[[int], Actions], model: SleepingModel) -> float:
    """Of a call among many: what one more of them adds to the time of all."""
    few = 4  # more than a pipe needs to fill, with as many microbatches as stages
    spans = [simulate_calls(actions(calls), model) for calls in (few, few + 1)]
    return spans[1] - spans[0]


def simulate_calls(actions: Actions, model: SleepingModel) -> float:
    """Seconds from an empty pipe to an empty pipe."""
    num_stages = 1 + max(action.stage for action in chain.from_iterable(actions))
    return simulate(actions, model.costs(num_stages)).makespan
