"""The simulator of schedules: timeline, memory, weight versions, pictures."""

from .action_table import ActionTable, tabulate
from .costs import Costs
from .csv_file import read_csv, without_updates, write_csv
from .from_actions import FromActions
from .from_trace import costs_from_timeline, timeline_from_trace
from .render import draw
from .simulate import Simulation, simulate
from .timeline import Timeline

__all__ = [
    "ActionTable",
    "Costs",
    "FromActions",
    "Simulation",
    "Timeline",
    "costs_from_timeline",
    "draw",
    "read_csv",
    "simulate",
    "tabulate",
    "timeline_from_trace",
    "without_updates",
    "write_csv",
]
