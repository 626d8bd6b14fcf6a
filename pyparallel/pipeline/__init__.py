"""Pipeline parallelism: schedules as data, what they cost before they have run, and their trainer.

A schedule says in which order each rank works (``actions``) and on which weights (``versions``);
``simulate`` proves that the order can run, and measures it. ``PipelineTrainer`` runs it.
"""

from .interlocking.head_conv import ConvHead
from .interlocking.head_linear import LinearHead
from .interlocking.head_pooled import PooledHead
from .interlocking.head_tied import TiedHead
from .interlocking.heads import Head
from .interlocking.schedule import Interlocking
from .interlocking.simulate import simulate_interlocking
from .interlocking.window import Farthest, Mean, Sum, Window
from .prediction.base import NoPrediction, Prediction, WeightPredictor
from .prediction.displacement import Displacement, PredictsStep
from .prediction.rollout import Rollout
from .runtime.executor import Span, StageError
from .schedules.action import Action, Kind, parse_action
from .schedules.gpipe import GPipe
from .schedules.interleaved import Interleaved
from .schedules.nesterov import Nesterov
from .schedules.one_forward_one_backward import OneForwardOneBackward
from .schedules.pipedream import PipeDream
from .schedules.pipedream_2bw import PipeDream2BW
from .schedules.pipemare import PipeMare
from .schedules.pipeoptim import PipeOptim
from .schedules.schedule import Schedule
from .schedules.shape import PipelineShape
from .schedules.spectrain import SpecTrain
from .schedules.versions import (
    Delayed,
    Live,
    Predicted,
    Recomputed,
    Speculative,
    Stashed,
    VersionCounters,
    Versions,
    WeightVersion,
)
from .schedules.xpipe import XPipe
from .schedules.zero_bubble import ZeroBubble
from .simulation.action_table import ActionTable, tabulate
from .simulation.costs import Costs
from .simulation.csv_file import read_csv, without_updates, write_csv
from .simulation.from_actions import FromActions
from .simulation.from_trace import costs_from_timeline, timeline_from_trace
from .simulation.render import draw
from .simulation.simulate import Simulation, simulate
from .simulation.timeline import Timeline
from .trainer import PipelineTrainer

__all__ = [
    "Action",
    "ActionTable",
    "ConvHead",
    "Costs",
    "Delayed",
    "Displacement",
    "Farthest",
    "FromActions",
    "GPipe",
    "Head",
    "Interleaved",
    "Interlocking",
    "Kind",
    "LinearHead",
    "Live",
    "Mean",
    "Nesterov",
    "NoPrediction",
    "OneForwardOneBackward",
    "PipeDream",
    "PipeDream2BW",
    "PipeMare",
    "PipeOptim",
    "PipelineShape",
    "PipelineTrainer",
    "PooledHead",
    "Predicted",
    "Prediction",
    "PredictsStep",
    "Recomputed",
    "Rollout",
    "Schedule",
    "Simulation",
    "Span",
    "SpecTrain",
    "Speculative",
    "StageError",
    "Stashed",
    "Sum",
    "TiedHead",
    "Timeline",
    "VersionCounters",
    "Versions",
    "WeightPredictor",
    "WeightVersion",
    "Window",
    "XPipe",
    "ZeroBubble",
    "costs_from_timeline",
    "draw",
    "parse_action",
    "read_csv",
    "simulate",
    "simulate_interlocking",
    "tabulate",
    "timeline_from_trace",
    "without_updates",
    "write_csv",
]
