"""The start and end times of actions, simulated or measured."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...pipeline.schedules.action import Kind
from .action_table import ActionTable


@dataclass(frozen=True, eq=False)
class Timeline:
    """Actions with their times, in the order of the table's rows.

    Args:
        table: the actions; a microbatch may be incomplete, in a part of a run.
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

    def step_starts(self, num_microbatches: int) -> np.ndarray:
        """Return when the first stage begins each step of ``num_microbatches``, ascending."""
        stages, kinds, microbatches = self.table.rows.T
        first = (stages == 0) & (kinds == Kind.FORWARD) & (microbatches % num_microbatches == 0)
        return np.sort(self.starts[first])

    def between(self, begin: float, end: float) -> "Timeline":
        """Return the part between two times, clipped to them; its time starts at ``begin``."""
        inside = (self.ends > begin) & (self.starts < end)
        ranks = np.bincount(self.table.ranks[inside], minlength=self.table.num_ranks)
        offsets = np.concatenate([[0], np.cumsum(ranks)]).astype(np.int64)
        table = ActionTable(self.table.rows[inside], offsets)
        starts = np.clip(self.starts[inside], begin, end) - begin
        return Timeline(table, starts, np.clip(self.ends[inside], begin, end) - begin)
