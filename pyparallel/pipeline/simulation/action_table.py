"""Every rank's actions as one array of integers: what the simulator reads."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from ..schedules.action import Action, Kind

_GRADIENT_KINDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, eq=False)
class ActionTable:
    """Actions of all ranks, rank after rank.

    Args:
        rows: (n, 3) int32, one action a row: stage, kind, microbatch.
        offsets: (num_ranks + 1,) int64, where each rank's rows begin, and n.
    """

    rows: np.ndarray
    offsets: np.ndarray

    @property
    def num_ranks(self) -> int:
        """Ranks, idle ones included."""
        return len(self.offsets) - 1

    @cached_property
    def num_stages(self) -> int:
        """The highest stage, plus one."""
        return int(self.rows[:, 0].max(initial=-1)) + 1

    @cached_property
    def num_microbatches(self) -> int:
        """The highest microbatch, plus one."""
        return int(self.rows[:, 2].max(initial=-1)) + 1

    @cached_property
    def ranks(self) -> np.ndarray:
        """(n,) the rank of each row."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.offsets))

    @cached_property
    def rank_of_stage(self) -> np.ndarray:
        """(num_stages,) int64: which rank holds a stage."""
        holders = np.zeros(self.num_stages, dtype=np.int64)
        holders[self.rows[:, 0]] = self.ranks
        return holders

    def action(self, row: int) -> Action:
        """A row as an action."""
        stage, kind, microbatch = self.rows[row].tolist()
        return Action(stage, Kind(kind), microbatch)

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """All rows as actions, rank by rank."""
        every = [Action(stage, Kind(kind), m) for stage, kind, m in self.rows.tolist()]
        bounds = self.offsets.tolist()
        return tuple(tuple(every[i:j]) for i, j in pairwise(bounds))

    def stage_rows(self) -> Iterator[np.ndarray]:
        """The numbers of each stage's rows, in the order in which they run."""
        by_stage = np.argsort(self.rows[:, 0], kind="stable")
        counts = np.bincount(self.rows[:, 0], minlength=self.num_stages)
        return iter(np.split(by_stage, np.cumsum(counts)[:-1]))


def tabulate(actions: Iterable[Iterable[Action]]) -> ActionTable:
    """The table of every rank's actions, as they are given: ``simulate`` checks them.

    Raises:
        ValueError: a stage or a microbatch does not fit into 32 bits.
    """
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
    """Check that each stage lives on one rank and handles each microbatch once, both ways.

    Whether the order can run is another question: ``simulate`` answers it.

    Raises:
        ValueError: the first thing found wrong.
    """
    if len(table.rows) == 0:
        raise ValueError("actions must hold at least one action, got none")
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
            f"actions must be of the kinds F, B, I, W and U, got {table.action(row)}: what "
            "Interlocking does waits for other things than a backward does"
        )
    _validate_density(stages, microbatches, table)
    _validate_homes(table)
    counts = _counts(table, stages, kinds, microbatches)
    _validate_counts(counts)


def _validate_density(stages: np.ndarray, microbatches: np.ndarray, table: ActionTable) -> None:
    """Refuse tables that are mostly holes, before any array of all places is made."""
    if table.num_stages * table.num_microbatches > len(table.rows):
        places = np.unique(stages.astype(np.int64) * table.num_microbatches + microbatches)
        gaps = np.flatnonzero(places != np.arange(len(places)))
        hole = int(gaps[0]) if len(gaps) else len(places)
        raise ValueError(_incomplete(*divmod(hole, table.num_microbatches), "none of them"))


def _incomplete(stage: int, microbatch: int, found: str) -> str:
    return (
        f"actions must hold one F and either one B or one I and one W for microbatch {microbatch} "
        f"on stage {stage}, got {found}"
    )


def _validate_homes(table: ActionTable) -> None:
    strangers = np.flatnonzero(table.rank_of_stage[table.rows[:, 0]] != table.ranks)
    if len(strangers):
        stage = table.rows[strangers[0], 0]
        raise ValueError(
            f"actions must keep each stage on one rank, got stage {stage} on ranks "
            f"{table.ranks[strangers[0]]} and {table.rank_of_stage[stage]}"
        )


def _counts(
    table: ActionTable, stages: np.ndarray, kinds: np.ndarray, microbatches: np.ndarray
) -> np.ndarray:
    """(kinds, stages, microbatches): how often each action occurs."""
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
        raise ValueError(_incomplete(stage, microbatch, ", ".join(found) or "none of them"))


def activation_changes(table: ActionTable) -> np.ndarray:
    """(n,) 1 where a row begins to hold its microbatch's activations, -1 where it frees them.

    They are held from the forward to the end of the backward, or of a split one's weight part.
    """
    kinds = table.rows[:, 1]
    return np.where(kinds == Kind.FORWARD, 1, np.where(np.isin(kinds, _GRADIENT_KINDS), -1, 0))
