"""What a schedule costs before it runs: timeline, memory, weight versions, pictures."""

from .action_table import ActionTable, tabulate
from .costs import Costs
from .csv_file import read_csv, without_updates, write_csv
from .from_actions import FromActions
from .from_trace import measure_costs, record
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
    "measure_costs",
    "read_csv",
    "record",
    "simulate",
    "tabulate",
    "without_updates",
    "write_csv",
]
