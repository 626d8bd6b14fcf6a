"""Tables of rows: what all of them share.

Each ``benchmarks/<folder>/table.py`` has functions that take rows of a file and return Markdown.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.rows import Row


@dataclass(frozen=True)
class Measure:
    """A score of rows, and how it is compared and printed."""

    title: str
    unit: str  # ``points``, ``%`` of the other score, or nothing: that of the score itself
    show: str
    limit: float  # of differences that are no matter
    field: str = "score"  # its column
    data: str = ""  # which task it is of

    def difference(self, score: float, exact: float) -> float:
        """Return how much higher a score is, in the unit."""
        if self.unit == "%":
            return 100 * (score / exact - 1)
        return (100 if self.unit == "points" else 1) * (score - exact)

    @property
    def better(self) -> str:
        """Where better scores lie in a picture."""
        return "right" if self.unit == "points" else "left"


MEASURES = [
    Measure("digits, test accuracy", "points", "{:.2%}", 1, data="digits"),
    Measure("text, held-out bits per byte", "%", "{:.3f}", 2, data="text"),
]


def measure_of(data: str) -> Measure:
    return next(measure for measure in MEASURES if measure.data == data)


def values(rows: Iterable[Row], measure: Measure) -> list[float]:
    """Return the scores of the runs that did not diverge."""
    found = [float(row[measure.field] or "inf") for row in rows]
    return [value for value in found if math.isfinite(value)]


def differences(rows: Iterable[Row], baseline: Iterable[Row], measure: Measure) -> list[float]:
    """Return the differences from the baseline's rows of the same seed, steps and ranks."""
    exact = {_alike(row): float(row[measure.field]) for row in baseline}
    pairs = [(float(row[measure.field]), exact.get(_alike(row))) for row in rows]
    return [measure.difference(score, other) for score, other in pairs if other is not None]


def _alike(row: Row) -> tuple[str | None, ...]:
    return tuple(row.get(name) for name in ("seed", "steps", "updates", "ranks"))


def of(rows: Sequence[Row], column: str) -> list[str]:
    """Return the distinct values of a column, in the order of the file."""
    return list(dict.fromkeys(row[column] for row in rows))


def where(rows: Sequence[Row], **columns: str) -> list[Row]:
    """Return the rows with these columns; none of a file that lacks a column."""
    return [row for row in rows if all(row.get(name) == columns[name] for name in columns)]


def grouped(rows: Sequence[Row], column: str, first: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Return the rows by a column: some values first if there are any, others as they come."""
    found = of(rows, column)
    order = [*(name for name in first if name in found), *(x for x in found if x not in first)]
    return {name: where(rows, **{column: name}) for name in order}


def mean(rows: Sequence[Row], field: str) -> float:
    return statistics.fmean(float(row[field]) for row in rows)


def numbers(cell: str) -> list[float]:
    return [float(number) for number in cell.split()]


def mean_losses(rows: Sequence[Row]) -> list[float]:
    """Return the mean of the runs' losses in each part of a run."""
    curves = [numbers(row["losses"]) for row in rows]
    return [statistics.fmean(part) for part in zip(*curves, strict=False)]


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rows = (f"| {' | '.join(map(str, cells))} |" for cells in (head, *lines))
    first, *others = rows
    return "\n".join([first, "|---" * len(head) + "|", *others, ""])
