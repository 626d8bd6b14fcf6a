"""Timelines as text: one line per rank, time from left to right."""

import math
from dataclasses import dataclass

import numpy as np

from ...pipeline.schedules.action import Kind
from .action_table import ActionTable

_MOST_COLUMNS = 64
_MOST_RANKS = 32
_MOST_PLACES = 4


@dataclass(frozen=True)
class _ColumnRange:
    """The columns of a grid that are shown, each of them ``tick`` long."""

    first: int
    last: int
    tick: float


def draw(table: ActionTable, starts: np.ndarray, ends: np.ndarray, columns: int = 64) -> str:
    """Return a text grid: a column is as long as the shortest computation, a dot is an idle rank.

    Updates are shown if they take at least half a column. Times are (n,); NaN: it does not run.
    """
    tick, last = _scale(table, starts, ends)
    return _grid(table, starts, ends, _ColumnRange(0, min(columns, last), tick), {})


def draw_deadlock(
    table: ActionTable, starts: np.ndarray, ends: np.ndarray, done: np.ndarray
) -> str:
    """Return a sentence on the actions that wait, and the end of the grid with these marked."""
    tick, last = _scale(table, starts, ends)
    stuck = np.flatnonzero(done < np.diff(table.offsets)).tolist()
    waiting = {rank: table.action(table.offsets[rank] + done[rank]) for rank in stuck}
    places = [f"rank {rank} at {action}" for rank, action in waiting.items()]
    if len(places) > _MOST_PLACES:
        places[_MOST_PLACES:] = [f"and {len(places) - _MOST_PLACES} more ranks"]
    sentence = "actions must not deadlock, got "
    marks = {rank: f" <- waits: {action}" for rank, action in waiting.items()}
    columns = _ColumnRange(max(0, last - _MOST_COLUMNS), last, tick)
    return f"{sentence}{', '.join(places)} that wait forever\n" + _grid(
        table, starts, ends, columns, marks
    )


def _scale(table: ActionTable, starts: np.ndarray, ends: np.ndarray) -> tuple[float, int]:
    lengths = (ends - starts)[table.rows[:, 1] != Kind.UPDATE]
    tick = float(lengths[lengths > 0].min()) if (lengths > 0).any() else 1.0
    return tick, math.ceil(np.nanmax(ends, initial=0.0) / tick - 1e-9)


def _grid(
    table: ActionTable,
    starts: np.ndarray,
    ends: np.ndarray,
    columns: _ColumnRange,
    marks: dict[int, str],
) -> str:
    ranks = min(table.num_ranks, _MOST_RANKS)
    cells = _cells(table, starts, ends, columns, ranks)
    ellipsis = "... " if columns.first else ""
    length = len(f"rank {ranks - 1}")
    lines = [
        (f"{f'rank {rank}':<{length}}  {ellipsis}{' '.join(line)}" + marks.get(rank, "")).rstrip()
        for rank, line in enumerate(cells)
    ]
    if table.num_ranks > ranks:
        lines.append(f"and {table.num_ranks - ranks} more ranks")
    return "\n".join(lines)


def _cells(
    table: ActionTable, starts: np.ndarray, ends: np.ndarray, columns: _ColumnRange, ranks: int
) -> list[list[str]]:
    shown = (ends - starts >= columns.tick / 2) & (table.ranks < ranks)
    shown &= (starts < columns.last * columns.tick) & (ends > columns.first * columns.tick)
    labels = {row: str(table.action(row)) for row in np.flatnonzero(shown).tolist()}
    width = max(map(len, labels.values()), default=1)
    num_columns = columns.last - columns.first
    cells = [[".".ljust(width)] * num_columns for _ in range(ranks)]
    for row, label in labels.items():
        begin = round(starts[row] / columns.tick) - columns.first
        end = max(begin + 1, round(ends[row] / columns.tick) - columns.first)
        for column in range(max(0, begin), min(end, num_columns)):
            text = label.ljust(width) if column == begin else "-" * width
            cells[table.ranks[row]][column] = text
    return cells
