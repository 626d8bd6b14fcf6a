"""How much of their time ranks wait, in pipelines whose stages sleep: measured, and on paper."""

from collections.abc import Callable, Sequence
from itertools import chain

from benchmarks.pipeline.models import SleepingModel
from benchmarks.pipeline.systems import System
from benchmarks.pipeline.turns import Plan, start, take_turns
from pyparallel.pipeline import Action, simulate

Actions = Sequence[Sequence[Action]]


def measure(
    rank: int, model: SleepingModel, systems: Sequence[System], num_microbatches: int, plan: Plan
) -> dict[str, tuple[list[float], float]]:
    """Of each system the seconds per microbatch in each turn, and what they are on paper."""
    trainings = start(systems, model, num_microbatches)
    seconds = take_turns(trainings, num_microbatches, plan)
    return {
        name: (seconds[name], seconds_on_paper(training.actions, model) / num_microbatches)
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
