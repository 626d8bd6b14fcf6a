"""A benchmark program with several parts: its arguments and rows."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.harness.measure import RESULTS, machine, write_rows

Row = dict[str, object]
Sizes = TypeVar("Sizes")
Parts = Mapping[str, Callable[[Sizes], Iterator[list[Row]]]]


def make_parser(
    name: str, description: str | None, parts: Sequence[str]
) -> argparse.ArgumentParser:
    """Return the argument parser of ``python -m benchmarks.<name>.bench``."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}.bench",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, help="another CSV file")
    return parser


def measure(
    name: str,
    parts: Parts[Sizes],
    sizes: Sizes,
    options: argparse.Namespace,
    fields: Sequence[str],
    show: Callable[[Sequence[Row]], None],
) -> None:
    """Run the requested parts; rows are written after each batch."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exiting ends the ranks
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # avoids DNS warnings in namespaces
    path = options.out or RESULTS / f"{name}-{machine()}.csv"
    for part in options.parts:
        rows: list[Row] = []
        for batch in parts[part](sizes):
            show(batch)
            rows += batch
            write_rows(rows, path, fields)
    if path.exists():
        print(f"\nrows: {path}\npictures: python -m benchmarks.{name}.picture {path}")
