"""Rows of measurements and of runs: CSV files, and what a row says of seconds and of this code."""

import csv
import functools
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "results"
SCALES = {"ms": 1e3, "us": 1e6}

Row = dict[str, Any]  # of text, once it has been read
Key = tuple[str, ...]


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(rows: Iterable[Row], path: Path, fields: Sequence[str]) -> None:
    """Write the rows of a file; a run that is killed leaves those that it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}.part")
    with whole.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    whole.replace(path)


def replace_rows(
    rows: Sequence[Row], path: Path, fields: Sequence[str], key: Sequence[str] | None = None
) -> None:
    """Write rows at the end of a file, in place of those with one of their keys.

    A key is of the columns ``key``; default: the first column.
    """
    key = key or fields[:1]
    measured = {tuple(str(row[name]) for name in key) for row in rows}
    kept = (row for row in read_rows(path) if tuple(row[name] for name in key) not in measured)
    write_rows([*kept, *rows], path, fields)


@dataclass
class RunRows:
    """A file with a row for each run, which begins with the run's key; sorted by key."""

    path: Path
    fields: Sequence[str]
    num_keys: int  # how many of the fields are the key

    def read(self) -> dict[Key, Row]:
        names = self.fields[: self.num_keys]
        return {tuple(row[name] for name in names): row for row in read_rows(self.path)}

    def add(self, key: Key, columns: Row) -> Row:
        """Add the row of a key, or replace it, in the file as it is now; return the row."""
        row = dict(zip(self.fields, key, strict=False)) | columns | stamp()
        known = self.read() | {key: row}
        write_rows([known[each] for each in sorted(known)], self.path, self.fields)
        return row

    def complete(
        self, runs: Iterable[Any], perform: Callable[[Any], Row], *, again: bool = False
    ) -> None:
        """Perform the runs whose ``key`` has no row, or all of them; write each row at once.

        ``perform`` trains once, and returns the columns after the key.
        """
        for run in runs:
            if again or run.key not in self.read():
                print(*run.key, file=sys.stderr, flush=True)
                self.add(run.key, perform(run))


def shorten(losses_of_ranks: Sequence[Sequence[float]], count: int = 40) -> list[float]:
    """Return the ranks' mean loss in ``count`` equal parts of the run (at least a step each)."""
    losses = [statistics.fmean(step) for step in zip(*losses_of_ranks, strict=False)]
    count = min(count, len(losses))
    bounds = [part * len(losses) // count for part in range(count + 1)]
    return [statistics.fmean(losses[begin:end]) for begin, end in pairwise(bounds)]


def as_text(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:.4g}" for number in numbers)


def summary(times: Sequence[float], unit: str = "ms", digits: int = 3) -> Row:
    repeated = times if len(times) > 1 else [*times, *times]
    tenths = statistics.quantiles(repeated, n=10, method="inclusive")
    found = {"median": statistics.median(times), "p20": tenths[1], "p80": tenths[7]}
    columns = {
        f"{name}_{unit}": f"{seconds * SCALES[unit]:.{digits}f}" for name, seconds in found.items()
    }
    return columns | stamp()


def rows_of(
    seconds: Mapping[str, Sequence[float]],
    base: Sequence[float],
    ratio_is: str,
    *,
    name: str = "system",
    digits: int = 3,
    more: Callable[[str], Row] = lambda each: {},
    **columns: object,
) -> list[Row]:
    """Return a row for each of what took turns, with the ratio of its median to that of the base.

    If what the ratio is begins with ``speed``, it is the base's time to the other. ``name`` is the
    column of the names; ``more`` gives columns of a name, which may replace those of all rows.
    """

    def ratio(times: Sequence[float]) -> float:
        quotient = statistics.median(times) / statistics.median(base)
        return 1 / quotient if ratio_is.startswith("speed") else quotient

    return [
        {
            **summary(times),
            **columns,
            name: each,
            "ratio": f"{ratio(times):.{digits}f}",
            "ratio_is": ratio_is,
            **more(each),
        }
        for each, times in seconds.items()
    ]


# Equal in most rows of a file, or long.
UNPRINTED = {"torch", "commit", "device", "compute", "options", "text", "texts", "rounds"}
UNPRINTED |= {"to_solution_at", "to_limit_at", "loss_at"}


def print_rows(rows: Iterable[Row]) -> None:
    """Print rows, a line each: the texts, then the numbers with the names of their columns."""
    for row in rows:
        cells = {name: str(value) for name, value in row.items() if name not in UNPRINTED}
        numbers = {name: cell for name, cell in cells.items() if _is_number(cell)}
        texts = [cell for name, cell in cells.items() if cell and name not in numbers]
        print(", ".join(texts), *(f"{name} {cell}" for name, cell in numbers.items()), sep="  ",
              flush=True)  # fmt: skip


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def record(
    batches: Iterable[Sequence[Row]],
    path: Path,
    fields: Sequence[str],
    key: Sequence[str] | None = None,
) -> list[Row]:
    """Print and write rows as they come, as ``replace_rows`` does; return all, as texts."""
    found: list[Row] = []
    for batch in batches:
        print_rows(batch)
        found += batch
        replace_rows(found, path, fields, key)
    print(f"\nrows: {path}")
    return [{field: str(row.get(field, "")) for field in fields} for row in found]


def machine() -> str:
    """Return a name for the results file: the processor or the GPU."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2] for line in lines if line.startswith("model name")]
        name = f"{models[0] if models else platform.machine()} {torch.get_num_threads()} threads"
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


def stamp() -> Row:
    return {"torch": torch.__version__, "commit": commit()}


@functools.cache
def commit() -> str:
    """Return the measured commit, marked if the working tree differs from it.

    A tree that was copied without its history can name it in ``PYPARALLEL_COMMIT``.
    """
    if named := os.environ.get("PYPARALLEL_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    root = Path(__file__).parent
    try:
        answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"  # a machine with a GPU may have no git
    return answer.stdout.strip() or "unknown"
