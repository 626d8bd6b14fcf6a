"""All schedules, for the tests that each of them must pass."""

from collections.abc import Sequence

import pytest

from pyparallel.pipeline import (
    GPipe,
    Nesterov,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipeMare,
    PipeOptim,
    Rollout,
    Schedule,
    XPipe,
    ZeroBubble,
    schedules,
)
from pyparallel.pipeline.schedules.schedule import Flushing
from pyparallel.planning.pipelines import Simulation, simulate

FLUSHING = [each for each in schedules.EVERY_SCHEDULE if isinstance(each, Flushing)]
STREAMING = [each for each in schedules.EVERY_SCHEDULE if not isinstance(each, Flushing)]
# Both predictions, with the same versions.
STREAMING[STREAMING.index(PipeOptim("consistent"))] = PipeOptim("consistent", Rollout(0.5))
STREAMING += [XPipe("consistent"), PipeMare(annealing=10, decay=0.25), Nesterov("live")]
EVERY_SCHEDULE = [*FLUSHING, *STREAMING]

# Different in what a stage runs, and in which weights it keeps.
KINDS = GPipe, ZeroBubble, PipeDream, PipeDream2BW, PipeMare, PipeOptim, XPipe


def one_of_each_kind(schedules: Sequence[Schedule]) -> list[Schedule]:
    """Return the first schedule of each kind."""
    of_kinds = [[each for each in schedules if isinstance(each, kind)] for kind in KINDS]
    return [each[0] for each in of_kinds if each]


def one_of_each_kind_first(schedules: Sequence[Schedule]) -> pytest.MarkDecorator:
    """Parametrize a test by the first schedule of each kind, and as a slow test by the others."""
    first = one_of_each_kind(schedules)
    others = [each for each in schedules if each not in first]
    slow = pytest.param(others, marks=pytest.mark.slow, id="others")
    return pytest.mark.parametrize("schedules", [pytest.param(first, id="one of each kind"), slow])


def run(schedule: Schedule, shape: PipelineShape, steps: int = 1, **options) -> Simulation:
    sizes = shape.num_stages, shape.num_microbatches, shape.num_ranks
    return simulate(schedule.actions(*sizes, steps), versions=schedule.versions(shape), **options)
