"""Every schedule, for the tests that all of them must pass."""

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


def run(schedule: Schedule, layout: PipelineShape, calls: int = 1, **options) -> Simulation:
    sizes = layout.num_stages, layout.num_microbatches, layout.num_ranks
    return simulate(schedule.actions(*sizes, calls), versions=schedule.versions(layout), **options)
