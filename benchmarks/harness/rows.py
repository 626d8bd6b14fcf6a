"""Rows of a table that grows with each run, as dicts of text in a CSV file."""

import csv
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

Row = dict[str, str]
Key = tuple[str, ...]


def merge(rows: Sequence[Row], row: Row, key_of: Callable[[Row], Key]) -> list[Row]:
    """Return the rows with one added, or replacing the one with its key, sorted by key."""
    return sorted([*(r for r in rows if key_of(r) != key_of(row)), row], key=key_of)


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(rows: Sequence[Row], path: Path, fields: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def shorten(losses_of_ranks: Sequence[Sequence[float]], count: int = 40) -> list[float]:
    """Return the ranks' mean loss in ``count`` equal parts of the run (at least a step each)."""
    losses = [statistics.fmean(step) for step in zip(*losses_of_ranks, strict=False)]
    count = min(count, len(losses))
    bounds = [part * len(losses) // count for part in range(count + 1)]
    return [statistics.fmean(losses[begin:end]) for begin, end in pairwise(bounds)]
