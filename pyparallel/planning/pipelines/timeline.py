"""The start and end times of actions, simulated or measured."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .action_table import ActionTable


@dataclass(frozen=True, eq=False)
class Timeline:
    """Actions with their times, in the order of the table's rows.

    Args:
        table: the actions.
        starts: (n,) float64 start times, in any one unit.
        ends: (n,) float64 end times.
        round_ends: (n,) float64, after an update that of the round with other replicas that begins
            then; otherwise ``ends``. None: there are none.
    """

    table: ActionTable
    starts: np.ndarray
    ends: np.ndarray
    round_ends: np.ndarray | None = field(default=None, kw_only=True)

    @cached_property
    def makespan(self) -> float:
        """Return the time of the last end."""
        return float(self.ends.max(initial=0.0))

    @cached_property
    def bubble(self) -> float:
        """Return the fraction of all ranks' time that is idle, warm-up and cool-down included."""
        return self.bubble_between(0.0, self.makespan)

    def bubble_between(self, begin: float, end: float) -> float:
        """Return the fraction of all ranks' time that is idle between ``begin`` and ``end``."""
        busy = np.clip(self.ends, begin, end) - np.clip(self.starts, begin, end)
        capacity = (end - begin) * self.table.num_ranks
        return float(1 - busy.sum() / capacity) if capacity > 0 else 0.0
