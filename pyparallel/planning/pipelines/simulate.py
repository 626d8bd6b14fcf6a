"""The simulation of a schedule: its time, memory, weight versions, and deadlocks."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...pipeline.schedules.action import Action, Kind
from ...pipeline.schedules.versions import Live, Versions
from .action_table import ActionTable, activation_changes, tabulate, validate
from .costs import Costs
from .event_loop import EventLoop, run, run_table
from .render import draw_deadlock
from .timeline import Timeline
from .weight_history import WeightHistory, trace_versions


@dataclass(frozen=True, eq=False)
class Simulation(Timeline):
    """A simulated run; ``weights`` are the versions read, their staleness, and the copies kept."""

    weights: WeightHistory

    @cached_property
    def peak_activations(self) -> np.ndarray:
        """Return the peak number of microbatches whose activations a stage holds: (num_stages,)."""
        changes = activation_changes(self.table)
        return np.array([changes[rows].cumsum().max() for rows in self.table.stage_rows()])

    @cached_property
    def peak_activations_of_ranks(self) -> np.ndarray:
        """Return the same for all stages of a rank together: (num_ranks,)."""
        ranks = np.split(activation_changes(self.table), self.table.offsets[1:-1])
        return np.array([changes.cumsum().max(initial=0) for changes in ranks])

    @cached_property
    def forward_staleness(self) -> np.ndarray:
        """Return the maximum staleness of a forward's version in updates: (num_stages,)."""
        return self._max_of_forwards(self.weights.staleness)

    @cached_property
    def forward_horizon(self) -> np.ndarray:
        """Return the maximum horizon of a forward's weights in updates: (num_stages,)."""
        return self._max_of_forwards(self.weights.horizon)

    def _max_of_forwards(self, values: np.ndarray) -> np.ndarray:
        forwards = self.table.rows[:, 1] == Kind.FORWARD
        largest = np.full(self.table.num_stages, np.iinfo(np.int64).min)
        np.maximum.at(largest, self.table.rows[forwards, 0], values[forwards])
        return largest


def simulate(
    actions: Iterable[Iterable[Action]] | ActionTable,
    costs: Costs = Costs(),  # noqa: B008 - immutable
    versions: Versions = Live(),  # noqa: B008 - immutable
    loop: EventLoop = run,
) -> Simulation:
    """Simulate the actions, by the durations of stages.

    ``versions`` is the policy of weight versions, ``schedule.versions(shape)``; ``loop`` the event
    loop, by default the compiled one if it is available. A stage's actions that are not complete,
    and ranks that would deadlock, are a ValueError, which shows the actions that have run.
    """
    table = actions if isinstance(actions, ActionTable) else tabulate(actions)
    validate(table)
    durations = costs.durations(table.num_stages)
    latencies = costs.latencies(table.num_stages)
    starts, done = run_table(table, durations, latencies, loop)
    ends = starts + durations[table.rows[:, 1], table.rows[:, 0]]
    if done.sum() < len(table.rows):
        raise ValueError(draw_deadlock(table, starts, ends, done))
    begins_round = table.rows[:, 1] == Kind.UPDATE
    rounds = np.where(begins_round, latencies[1, table.rows[:, 0]], 0.0)
    return Simulation(
        table, starts, ends, trace_versions(table, versions), round_ends=ends + rounds
    )
