"""The actions of all ranks in one integer array, the simulator's input."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from ...pipeline.schedules.action import Action, Kind
from ...training.arguments import require

_GRADIENT_KINDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, eq=False)
class ActionTable:
    """The actions of all ranks, rank after rank.

    Args:
        rows: (n, 3) int32, one action per row: stage, kind, microbatch.
        offsets: (num_ranks + 1,) int64, the first row of each rank, and n.
    """

    rows: np.ndarray
    offsets: np.ndarray

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks, idle ones included."""
        return len(self.offsets) - 1

    @cached_property
    def num_stages(self) -> int:
        """Return the highest stage plus one."""
        return int(self.rows[:, 0].max(initial=-1)) + 1

    @cached_property
    def num_microbatches(self) -> int:
        """Return the highest microbatch plus one."""
        return int(self.rows[:, 2].max(initial=-1)) + 1

    @cached_property
    def ranks(self) -> np.ndarray:
        """Return the rank of each row: (n,) int64."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.offsets))

    @cached_property
    def rank_of_stage(self) -> np.ndarray:
        """Return the rank of each stage: (num_stages,) int64."""
        ranks_of_stages = np.zeros(self.num_stages, dtype=np.int64)
        ranks_of_stages[self.rows[:, 0]] = self.ranks
        return ranks_of_stages

    def action(self, row: int) -> Action:
        """Return a row as an action."""
        stage, kind, microbatch = self.rows[row].tolist()
        return Action(stage, Kind(kind), microbatch)

    def stage_rows(self) -> Iterator[np.ndarray]:
        """Yield the row indices of each stage, in the order in which they run."""
        by_stage = np.argsort(self.rows[:, 0], kind="stable")
        counts = np.bincount(self.rows[:, 0], minlength=self.num_stages)
        return iter(np.split(by_stage, np.cumsum(counts)[:-1]))


def tabulate(actions: Iterable[Iterable[Action]]) -> ActionTable:
    """Return the table of all ranks' actions, unchecked; ``simulate`` checks it."""
    try:
        pieces = [
            np.fromiter(chain.from_iterable(rank), dtype=np.int32).reshape(-1, 3)
            for rank in actions
        ]
    except OverflowError as error:
        raise ValueError(
            f"actions must number stages and microbatches below 2**31: {error}"
        ) from error
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return ActionTable(np.concatenate([np.empty((0, 3), np.int32), *pieces]), offsets)


def validate(table: ActionTable) -> None:
    """Raise a ValueError unless each stage is on one rank, with all actions of its microbatches."""
    require(len(table.rows), "actions must hold at least one action", "none")
    stages, kinds, microbatches = table.rows.T
    if table.rows.min() < 0 or kinds.max() > max(Kind):
        bad = tuple(table.rows[(table.rows.min(axis=1) < 0) | (kinds > max(Kind))][0].tolist())
        raise ValueError(
            f"actions must have a stage and a microbatch from 0 on and a kind from 0 to "
            f"{max(Kind).value}, got {bad}"
        )
    if kinds.max() > Kind.UPDATE:
        row = int(np.flatnonzero(kinds > Kind.UPDATE)[0])
        raise ValueError(
            f"actions must be of the kinds F, B, I, W and U, got {table.action(row)}: use "
            "simulate_interlocking for the actions of Interlocking"
        )
    _validate_density(stages, microbatches, table)
    _validate_ranks(table)
    counts = _counts(table, stages, kinds, microbatches)
    _validate_counts(counts)


def _validate_density(stages: np.ndarray, microbatches: np.ndarray, table: ActionTable) -> None:
    if table.num_stages * table.num_microbatches > len(table.rows):
        present = np.unique(stages.astype(np.int64) * table.num_microbatches + microbatches)
        gaps = np.flatnonzero(present != np.arange(len(present)))
        first_gap = int(gaps[0]) if len(gaps) else len(present)
        raise ValueError(_incomplete(*divmod(first_gap, table.num_microbatches), "none"))


def _incomplete(stage: int, microbatch: int, found: str) -> str:
    return (
        f"actions must hold one F and either one B or one I and one W for microbatch {microbatch} "
        f"on stage {stage}, got {found}"
    )


def _validate_ranks(table: ActionTable) -> None:
    misplaced = np.flatnonzero(table.rank_of_stage[table.rows[:, 0]] != table.ranks)
    if len(misplaced):
        stage = table.rows[misplaced[0], 0]
        raise ValueError(
            f"actions must keep each stage on one rank, got stage {stage} on ranks "
            f"{table.ranks[misplaced[0]]} and {table.rank_of_stage[stage]}"
        )


def _counts(
    table: ActionTable, stages: np.ndarray, kinds: np.ndarray, microbatches: np.ndarray
) -> np.ndarray:
    shape = (len(Kind), table.num_stages, table.num_microbatches)
    flat = np.ravel_multi_index((kinds, stages, microbatches), shape)
    return np.bincount(flat, minlength=np.prod(shape)).reshape(shape)


def _validate_counts(counts: np.ndarray) -> None:
    doubled = np.argwhere(counts > 1)
    if len(doubled):
        kind, stage, microbatch = doubled[0].tolist()
        action = Action(stage, Kind(kind), microbatch)
        times = counts[kind, stage, microbatch]
        raise ValueError(f"actions must not repeat, got {action} {times} times")
    forward, backward, backward_input, backward_weight, *_ = counts
    wrong = np.argwhere(
        (forward != 1) | (backward + backward_input != 1) | (backward_input != backward_weight)
    )
    if len(wrong):
        stage, microbatch = wrong[0].tolist()
        found = [
            str(Action(stage, kind, microbatch))
            for kind in Kind
            if kind is not Kind.UPDATE and counts[kind, stage, microbatch]
        ]
        raise ValueError(_incomplete(stage, microbatch, ", ".join(found) or "none"))


def activation_changes(table: ActionTable) -> np.ndarray:
    """Return 1 for rows that allocate a microbatch's activations, -1 for rows that free them."""
    kinds = table.rows[:, 1]
    return np.where(kinds == Kind.FORWARD, 1, np.where(np.isin(kinds, _GRADIENT_KINDS), -1, 0))
