"""A schedule as text: one line a rank, time from left to right."""

import math
from dataclasses import dataclass

import numpy as np

from .table import ActionTable

_MOST_COLUMNS = 64
_MOST_RANKS = 32


@dataclass(frozen=True)
class _Window:
    """The part of a run that is shown."""

    first: int
    last: int
    tick: float


def draw(table: ActionTable, starts: np.ndarray, ends: np.ndarray, columns: int = 64) -> str:
    """The grid: a column is as long as the shortest action, a dot is a rank that waits.

    Args:
        table: the actions.
        starts: (n,) when each begins; NaN for one that does not run.
        ends: (n,) when each is over.
        columns: how many columns to show, from the beginning.
    """
    tick = _tick(starts, ends)
    last = min(columns, _column(np.nanmax(ends, initial=0.0), tick))
    return "\n".join(_lines(table, starts, ends, _Window(0, last, tick)))


def draw_deadlock(
    table: ActionTable, starts: np.ndarray, ends: np.ndarray, done: np.ndarray
) -> str:
    """One sentence on who waits for what, and the grid up to there with the places marked."""
    tick = _tick(starts, ends)
    last = _column(np.nanmax(ends, initial=0.0), tick)
    stuck = np.flatnonzero(done < np.diff(table.offsets)).tolist()
    places = [f"rank {rank} at {table.action(table.offsets[rank] + done[rank])}" for rank in stuck]
    shown, more = places[:4], len(places) - 4
    window = _Window(max(0, last - _MOST_COLUMNS), last, tick)
    lines = _lines(table, starts, ends, window)
    for rank in stuck[:_MOST_RANKS]:
        lines[rank] += f" <- waits: {table.action(table.offsets[rank] + done[rank])}"
    return "\n".join(
        [
            f"actions must not wait for each other in a circle, got {', '.join(shown)}"
            + (f" and {more} more ranks" if more > 0 else "")
            + " that wait for ever",
            *lines,
        ]
    )


def _tick(starts: np.ndarray, ends: np.ndarray) -> float:
    lengths = ends - starts
    return float(np.min(lengths[lengths > 0], initial=np.inf)) if (lengths > 0).any() else 1.0


def _column(time: float, tick: float) -> int:
    return math.ceil(time / tick - 1e-9)


def _lines(table: ActionTable, starts: np.ndarray, ends: np.ndarray, window: _Window) -> list[str]:
    shown = (starts < window.last * window.tick) & (ends > starts)
    shown &= ends > window.first * window.tick
    rows = np.flatnonzero(shown & (table.ranks < _MOST_RANKS)).tolist()
    labels = {row: str(table.action(row)) for row in rows}
    width = max(map(len, labels.values()), default=1)
    ranks = min(table.num_ranks, _MOST_RANKS)
    cells = [[".".ljust(width)] * (window.last - window.first) for _ in range(ranks)]
    for row, label in labels.items():
        begin = round(starts[row] / window.tick) - window.first
        end = max(begin + 1, round(ends[row] / window.tick) - window.first)
        for column in range(max(0, begin), min(end, window.last - window.first)):
            text = label.ljust(width) if column == begin else "-" * width
            cells[table.ranks[row]][column] = text
    begin = "... " if window.first else ""
    names = [f"rank {rank}" for rank in range(ranks)]
    length = max(map(len, names))
    lines = [
        f"{name:<{length}}  {begin}{' '.join(line)}".rstrip()
        for name, line in zip(names, cells, strict=True)
    ]
    return lines + [f"and {table.num_ranks - ranks} more ranks"] * (table.num_ranks > ranks)
