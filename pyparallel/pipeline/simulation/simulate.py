"""What a schedule costs before it has run: time, memory, weight versions. Or that it cannot run."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..schedules.action import Action, Kind
from ..schedules.versions import Live, Versions
from .action_table import ActionTable, activation_changes, tabulate, validate
from .costs import Costs
from .event_loop import EventLoop, run, run_table
from .render import draw_deadlock
from .timeline import Timeline
from .weight_history import WeightHistory, trace_versions


@dataclass(frozen=True, eq=False)
class Simulation(Timeline):
    """A run of every action, on paper.

    Args:
        table: the actions.
        starts: (n,) float64, when each begins, in the unit of the costs.
        ends: (n,) float64, when each is over.
        weights: which weights each reads, how stale they are, and how many copies that takes.
    """

    weights: WeightHistory

    @cached_property
    def peak_activations(self) -> np.ndarray:
        """(num_stages,) the most microbatches whose activations a stage holds at once."""
        changes = activation_changes(self.table)
        return np.array([changes[rows].cumsum().max() for rows in self.table.stage_rows()])

    @cached_property
    def peak_activations_of_ranks(self) -> np.ndarray:
        """(num_ranks,) the same for all stages of a rank together."""
        ranks = np.split(activation_changes(self.table), self.table.offsets[1:-1])
        return np.array([changes.cumsum().max(initial=0) for changes in ranks])

    @cached_property
    def forward_staleness(self) -> np.ndarray:
        """(num_stages,) the most updates that a forward's version is too old by."""
        return self._most_of_forwards(self.weights.staleness)

    @cached_property
    def forward_horizon(self) -> np.ndarray:
        """(num_stages,) the most updates that a forward's weights are predicted ahead."""
        return self._most_of_forwards(self.weights.horizon)

    def _most_of_forwards(self, of_rows: np.ndarray) -> np.ndarray:
        forwards = self.table.rows[:, 1] == Kind.FORWARD
        most = np.full(self.table.num_stages, np.iinfo(np.int64).min)
        np.maximum.at(most, self.table.rows[forwards, 0], of_rows[forwards])
        return most


def simulate(
    actions: Iterable[Iterable[Action]] | ActionTable,
    costs: Costs = Costs(),  # noqa: B008 - immutable
    versions: Versions = Live(),  # noqa: B008 - immutable
    loop: EventLoop = run,
) -> Simulation:
    """Run the actions on paper.

    Args:
        actions: of every rank, or their table.
        costs: times by stage; the default is 1 for a forward and 2 for a backward.
        versions: the policy of weight versions, ``schedule.versions(layout)``.
        loop: the event loop: the compiled one where there is one.

    Raises:
        ValueError: a stage's actions are not complete, or the ranks would wait for each other for
            ever; then with the grid of what has run.
    """
    table = actions if isinstance(actions, ActionTable) else tabulate(actions)
    validate(table)
    durations = costs.durations(table.num_stages)
    starts, done = run_table(table, durations, costs.latencies(table.num_stages), loop)
    ends = starts + durations[table.rows[:, 1], table.rows[:, 0]]
    if done.sum() < len(table.rows):
        raise ValueError(draw_deadlock(table, starts, ends, done))
    return Simulation(table, starts, ends, trace_versions(table, versions))
