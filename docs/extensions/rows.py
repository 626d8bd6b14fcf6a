"""Numbers of the committed rows in ``benchmarks/results/``, for pages and for the README.

A page writes ``{{ value("gossip-amd-epyc-2-threads", "median_ms", method="SGP", ...) }}``. A number
without a row, or with several, is an error that names the file and the conditions.
"""

import csv
import statistics
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
USED: set[Path] = set()  # the files that pages were made of since it was emptied

Row = dict[str, str]


def read(name: str) -> tuple[Row, ...]:
    """Return all rows of ``benchmarks/results/<name>.csv``."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        raise LookupError(f"benchmarks/results has no {name}.csv")
    USED.add(path)
    return _read(path)


@cache
def _read(path: Path) -> tuple[Row, ...]:
    with path.open(newline="") as file:
        return tuple(csv.DictReader(file))


def rows(name: str, **where: object) -> list[Row]:
    """Return the rows whose columns equal ``where``; at least one."""
    found = list(read(name))
    for column, wanted in where.items():
        if column not in found[0]:
            raise LookupError(f"{name}.csv has no column {column}, only {', '.join(found[0])}")
        left = [row for row in found if row[column] == str(wanted)]
        if not left:
            known = ", ".join(dict.fromkeys(row[column] for row in found))
            raise LookupError(f"{name}.csv has no row with {where}: {column} is one of {known}")
        found = left
    return found


def number(row: Row, name: str, column: str) -> float:
    """Return a column of a row as a float; an empty cell is an error."""
    if column not in row:
        raise LookupError(f"{name}.csv has no column {column}, only {', '.join(row)}")
    if not row[column]:
        raise LookupError(f"{name}.csv has no {column} in the row {row}")
    return float(row[column])


def value(name: str, column: str, **where: object) -> float:
    """Return a column of the only row with ``where``."""
    found = rows(name, **where)
    if len(found) > 1:
        raise LookupError(f"{name}.csv must have one row with {where}, got {len(found)}")
    return number(found[0], name, column)


def mean(name: str, column: str, **where: object) -> float:
    """Return the mean of a column over the rows with ``where``, such as those of all seeds."""
    return statistics.fmean(number(row, name, column) for row in rows(name, **where))


def best_mean(name: str, column: str, by: str, **where: object) -> float:
    """Return the least mean of a column, of those for each value of the column ``by``."""
    values = {row[by] for row in rows(name, **where)}
    return min(mean(name, column, **where, **{by: each}) for each in values)


def std(name: str, column: str, **where: object) -> float:
    """Return the sample standard deviation of a column over the rows with ``where``."""
    return statistics.stdev(number(row, name, column) for row in rows(name, **where))
