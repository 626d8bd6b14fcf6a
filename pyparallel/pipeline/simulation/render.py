"""A schedule as text: one line a rank, time from left to right."""

import math
from dataclasses import dataclass

import numpy as np

from ..schedules.action import Kind
from .action_table import ActionTable

_MOST_COLUMNS = 64
_MOST_RANKS = 32
_MOST_PLACES = 4


@dataclass(frozen=True)
class _ColumnRange:
    """The part of a run that is shown."""

    first: int
    last: int
    tick: float


def draw(table: ActionTable, starts: np.ndarray, ends: np.ndarray, columns: int = 64) -> str:
    """The grid: a column is as long as the shortest computation, a dot is a rank that waits.

    Updates show where they take at least half a column.

    Args:
        table: the actions.
        starts: (n,) when each begins; NaN for one that does not run.
        ends: (n,) when each is over.
        columns: how many columns to show, from the beginning.
    """
    tick, last = _column_width_and_count(table, starts, ends)
    return _grid(table, starts, ends, _ColumnRange(0, min(columns, last), tick), {})


def draw_deadlock(
    table: ActionTable, starts: np.ndarray, ends: np.ndarray, done: np.ndarray
) -> str:
    """One sentence on who waits for what, and the end of the grid with the places marked."""
    tick, last = _column_width_and_count(table, starts, ends)
    stuck = np.flatnonzero(done < np.diff(table.offsets)).tolist()
    waiting = {rank: table.action(table.offsets[rank] + done[rank]) for rank in stuck}
    places = [f"rank {rank} at {action}" for rank, action in waiting.items()]
    if len(places) > _MOST_PLACES:
        places[_MOST_PLACES:] = [f"and {len(places) - _MOST_PLACES} more ranks"]
    sentence = "actions must not wait for each other in a circle, got "
    marks = {rank: f" <- waits: {action}" for rank, action in waiting.items()}
    columns_shown = _ColumnRange(max(0, last - _MOST_COLUMNS), last, tick)
    return f"{sentence}{', '.join(places)} that wait for ever\n" + _grid(
        table, starts, ends, columns_shown, marks
    )


def _column_width_and_count(
    table: ActionTable, starts: np.ndarray, ends: np.ndarray
) -> tuple[float, int]:
    """How long a column is, and how many there are."""
    lengths = (ends - starts)[table.rows[:, 1] != Kind.UPDATE]
    tick = float(lengths[lengths > 0].min()) if (lengths > 0).any() else 1.0
    return tick, math.ceil(np.nanmax(ends, initial=0.0) / tick - 1e-9)


def _grid(
    table: ActionTable,
    starts: np.ndarray,
    ends: np.ndarray,
    columns_shown: _ColumnRange,
    marks: dict[int, str],
) -> str:
    ranks = min(table.num_ranks, _MOST_RANKS)
    cells = _cells(table, starts, ends, columns_shown, ranks)
    cut = "... " if columns_shown.first else ""
    length = len(f"rank {ranks - 1}")
    lines = [
        (f"{f'rank {rank}':<{length}}  {cut}{' '.join(line)}" + marks.get(rank, "")).rstrip()
        for rank, line in enumerate(cells)
    ]
    if table.num_ranks > ranks:
        lines.append(f"and {table.num_ranks - ranks} more ranks")
    return "\n".join(lines)


def _cells(
    table: ActionTable,
    starts: np.ndarray,
    ends: np.ndarray,
    columns_shown: _ColumnRange,
    ranks: int,
) -> list[list[str]]:
    """The text of each column of each rank."""
    shown = (ends - starts >= columns_shown.tick / 2) & (table.ranks < ranks)
    shown &= (starts < columns_shown.last * columns_shown.tick) & (
        ends > columns_shown.first * columns_shown.tick
    )
    labels = {row: str(table.action(row)) for row in np.flatnonzero(shown).tolist()}
    width = max(map(len, labels.values()), default=1)
    columns = columns_shown.last - columns_shown.first
    cells = [[".".ljust(width)] * columns for _ in range(ranks)]
    for row, label in labels.items():
        begin = round(starts[row] / columns_shown.tick) - columns_shown.first
        end = max(begin + 1, round(ends[row] / columns_shown.tick) - columns_shown.first)
        for column in range(max(0, begin), min(end, columns)):
            text = label.ljust(width) if column == begin else "-" * width
            cells[table.ranks[row]][column] = text
    return cells
