"""Schedules: the order of each rank's actions, and the weight version that each action reads."""

from dataclasses import replace

from .action import Action, Kind, parse_action
from .gpipe import GPipe
from .interleaved import Interleaved
from .nesterov import Nesterov
from .one_forward_one_backward import OneForwardOneBackward
from .pipedream import PipeDream
from .pipedream_2bw import PipeDream2BW
from .pipemare import PipeMare
from .pipeoptim import PipeOptim
from .schedule import Flushing, Schedule
from .shape import PipelineShape
from .spectrain import SpecTrain
from .streaming import Streaming
from .versions import (
    Delayed,
    Estimated,
    Live,
    Predicted,
    Speculative,
    Stashed,
    VersionCounters,
    Versions,
    WeightVersion,
)
from .xpipe import XPipe
from .zero_bubble import ZeroBubble

__all__ = [
    "Action",
    "Delayed",
    "Estimated",
    "Flushing",
    "GPipe",
    "Interleaved",
    "Kind",
    "Live",
    "Nesterov",
    "OneForwardOneBackward",
    "PipeDream",
    "PipeDream2BW",
    "PipeMare",
    "PipeOptim",
    "PipelineShape",
    "Predicted",
    "Schedule",
    "SpecTrain",
    "Speculative",
    "Stashed",
    "Streaming",
    "VersionCounters",
    "Versions",
    "WeightVersion",
    "XPipe",
    "ZeroBubble",
    "parse_action",
]


def every_schedule(synchronous_updates: int = 0) -> tuple[Schedule, ...]:
    """Return all schedules with the options of their papers, the delayed ones started so."""
    streaming: tuple[Streaming, ...] = (
        PipeDream(),
        PipeDream2BW(),
        SpecTrain(variant=1),
        SpecTrain(variant=2),
        XPipe(),
        PipeOptim(weights="live"),
        PipeOptim(weights="consistent"),
        PipeMare(),
        Nesterov(),
    )
    started = (replace(each, synchronous_updates=synchronous_updates) for each in streaming)
    return GPipe(), OneForwardOneBackward(), Interleaved(), ZeroBubble(), *started


# ``python -m pyparallel plan`` and the tests run all of them.
EVERY_SCHEDULE = every_schedule()
