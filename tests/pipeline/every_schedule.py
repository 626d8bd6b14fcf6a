"""All schedules, for the tests that each of them must pass."""

from pyparallel.pipeline import (
    GPipe,
    Interleaved,
    Nesterov,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipeMare,
    PipeOptim,
    Rollout,
    Schedule,
    Simulation,
    SpecTrain,
    XPipe,
    ZeroBubble,
    simulate,
)

FLUSHING = [GPipe(), OneForwardOneBackward(), Interleaved(), ZeroBubble()]
STREAMING = [
    PipeDream(),
    PipeDream2BW(),
    SpecTrain(variant=1),
    SpecTrain(variant=2),
    XPipe("live"),
    XPipe("consistent"),
    PipeOptim("live"),
    PipeOptim("consistent", Rollout(0.5)),
    PipeMare(),
    PipeMare(annealing=10, decay=0.25),
    Nesterov("consistent"),
    Nesterov("live"),
]
EVERY_SCHEDULE = [*FLUSHING, *STREAMING]


def run(schedule: Schedule, shape: PipelineShape, steps: int = 1, **options) -> Simulation:
    sizes = shape.num_stages, shape.num_microbatches, shape.num_ranks
    return simulate(schedule.actions(*sizes, steps), versions=schedule.versions(shape), **options)
