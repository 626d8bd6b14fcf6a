"""Schedules: in which order every rank works, and which weight version each action reads."""

from .action import Action, Kind, parse_action
from .gpipe import GPipe
from .interleaved import Interleaved
from .nesterov import Nesterov
from .one_forward_one_backward import OneForwardOneBackward
from .pipedream import PipeDream
from .pipedream_2bw import PipeDream2BW
from .pipemare import PipeMare
from .pipeoptim import PipeOptim
from .schedule import Schedule
from .shape import Layout
from .spectrain import SpecTrain
from .versions import (
    Delayed,
    Kept,
    Live,
    Moments,
    Predicted,
    Reading,
    Reconstructed,
    Speculative,
    Versions,
)
from .xpipe import XPipe
from .zero_bubble import ZeroBubble

__all__ = [
    "Action",
    "Delayed",
    "GPipe",
    "Interleaved",
    "Kept",
    "Kind",
    "Layout",
    "Live",
    "Moments",
    "Nesterov",
    "OneForwardOneBackward",
    "PipeDream",
    "PipeDream2BW",
    "PipeMare",
    "PipeOptim",
    "Predicted",
    "Reading",
    "Reconstructed",
    "Schedule",
    "SpecTrain",
    "Speculative",
    "Versions",
    "XPipe",
    "ZeroBubble",
    "parse_action",
]
