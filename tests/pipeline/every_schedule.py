"""All schedules, for the tests that each of them must pass."""

from pyparallel.pipeline import (
    Nesterov,
    PipelineShape,
    PipeMare,
    PipeOptim,
    Rollout,
    Schedule,
    Simulation,
    XPipe,
    schedules,
    simulate,
)
from pyparallel.pipeline.schedules.schedule import Flushing

FLUSHING = [each for each in schedules.EVERY_SCHEDULE if isinstance(each, Flushing)]
STREAMING = [each for each in schedules.EVERY_SCHEDULE if not isinstance(each, Flushing)]
# Both predictions, with the same versions.
STREAMING[STREAMING.index(PipeOptim("consistent"))] = PipeOptim("consistent", Rollout(0.5))
STREAMING += [XPipe("consistent"), PipeMare(annealing=10, decay=0.25), Nesterov("live")]
EVERY_SCHEDULE = [*FLUSHING, *STREAMING]


def run(schedule: Schedule, shape: PipelineShape, steps: int = 1, **options) -> Simulation:
    sizes = shape.num_stages, shape.num_microbatches, shape.num_ranks
    return simulate(schedule.actions(*sizes, steps), versions=schedule.versions(shape), **options)
