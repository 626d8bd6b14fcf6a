"""Pipeline parallelism: schedules as data, what they cost before they have run, and their trainer.

A schedule says in which order each rank works (``actions``) and on which weights (``versions``);
``simulate`` proves that the order can run, and measures it. ``PipelineTrainer`` runs it.
"""

from .action import Action, Kind, parse_action
from .costs import Costs
from .csv_file import read_csv, without_updates, write_csv
from .displacement import Displacement, Displaces
from .draw import draw
from .executor import Span, StageError
from .from_actions import FromActions
from .from_spans import measure_costs, record
from .gpipe import GPipe
from .head_conv import ConvHead
from .head_linear import LinearHead
from .head_pooled import PooledHead
from .head_tied import TiedHead
from .heads import Head
from .interleaved import Interleaved
from .interlocked_timeline import simulate_interlocking
from .interlocking import Interlocking
from .layout import Layout
from .nesterov import Nesterov
from .one_forward_one_backward import OneForwardOneBackward
from .pipedream import PipeDream
from .pipedream_2bw import PipeDream2BW
from .pipemare import PipeMare
from .pipeoptim import PipeOptim
from .prediction import Foresight, Prediction, Unpredicted
from .rollout import Rollout
from .schedule import Schedule
from .simulate import Simulation, simulate
from .spectrain import SpecTrain
from .table import ActionTable, tabulate
from .timeline import Timeline
from .trainer import PipelineTrainer
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
from .window import Farthest, Mean, Sum, Window
from .xpipe import XPipe
from .zero_bubble import ZeroBubble

__all__ = [
    "Action",
    "ActionTable",
    "ConvHead",
    "Costs",
    "Delayed",
    "Displacement",
    "Displaces",
    "Farthest",
    "Foresight",
    "FromActions",
    "GPipe",
    "Head",
    "Interleaved",
    "Interlocking",
    "Kept",
    "Kind",
    "Layout",
    "LinearHead",
    "Live",
    "Mean",
    "Moments",
    "Nesterov",
    "OneForwardOneBackward",
    "PipeDream",
    "PipeDream2BW",
    "PipeMare",
    "PipeOptim",
    "PipelineTrainer",
    "PooledHead",
    "Predicted",
    "Prediction",
    "Reading",
    "Reconstructed",
    "Rollout",
    "Schedule",
    "Simulation",
    "Span",
    "SpecTrain",
    "Speculative",
    "StageError",
    "Sum",
    "TiedHead",
    "Timeline",
    "Unpredicted",
    "Versions",
    "Window",
    "XPipe",
    "ZeroBubble",
    "draw",
    "measure_costs",
    "parse_action",
    "read_csv",
    "record",
    "simulate",
    "simulate_interlocking",
    "tabulate",
    "without_updates",
    "write_csv",
]
