"""The simulator of schedules: timeline, memory, weight versions, pictures."""

from .action_table import ActionTable, tabulate
from .chrome_trace import export_chrome_trace
from .costs import Costs
from .csv_file import read_csv, without_updates, write_csv
from .from_actions import FromActions
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
    "export_chrome_trace",
    "read_csv",
    "simulate",
    "tabulate",
    "without_updates",
    "write_csv",
]
