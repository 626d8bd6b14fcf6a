"""Schedules of pipelines, simulated: timeline, memory, weight versions, pictures."""

from .action_table import ActionTable, tabulate
from .costs import Costs
from .csv_file import read_csv, without_updates, write_csv
from .from_actions import FromActions
from .interlocking import simulate_interlocking
from .render import draw
from .simulate import Simulation, simulate
from .timeline import Timeline

__all__ = [
    "ActionTable",
    "Costs",
    "FromActions",
    "Simulation",
    "Timeline",
    "draw",
    "read_csv",
    "simulate",
    "simulate_interlocking",
    "tabulate",
    "without_updates",
    "write_csv",
]
