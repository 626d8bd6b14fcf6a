"""Benchmark programs: their arguments, and how one with several parts runs."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.rows import (
    RESULTS,
    Key,
    Row,
    RunRows,
    commit,
    machine,
    read_rows,
    record,
)


@dataclass(frozen=True)
class LinkRun:
    """One training run by a method, over a link."""

    link: str
    method: str
    seed: int
    steps: int

    @property
    def key(self) -> Key:
        return self.link, self.method, str(self.seed)


def find_link_runs(steps: int, options: argparse.Namespace) -> Iterator[LinkRun]:
    """Return the runs of the links, seeds and methods that a command line has chosen."""
    for link, seed, method in product(options.links, options.seeds, options.methods):
        yield LinkRun(link, method, seed, steps)


Parts = Mapping[str, Callable[[Any], Iterator[list[Row]]]]


class _Parser(argparse.ArgumentParser):
    """A parser that refuses to measure for the pages what no commit has."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        options = super().parse_args(*args, **kwargs)
        measures = getattr(options, "seeds", None) != []
        of_pages = options.out is None or options.out.resolve().parent == RESULTS.resolve()
        if measures and of_pages and commit().endswith("-dirty"):
            self.error(
                f"rows of {RESULTS.name}/ must be of a commit, got uncommitted changes: commit "
                "them, or pass --out"
            )
        return options


def make_parser(
    module: str, description: str | None, file: str | None = None
) -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks.<module>``, with ``--out``: by default a file."""
    parser = _Parser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = RESULTS / f"{file}.csv" if file else None
    parser.add_argument("--out", type=Path, default=default, help="another CSV file")
    return parser


def compare(
    module: str,
    description: str | None,
    rows: RunRows,
    find_runs: Callable[[argparse.Namespace], Iterable[Any]],
    perform: Callable[[Any], Row],
    markdown: Callable[[Sequence[Row]], str],
    seeds: Sequence[int] | None,
    **choices: Sequence[str],
) -> None:
    """Perform the runs that the command line of a comparison chooses and that have no row.

    Then the tables of all rows are printed. Each of ``choices`` is an argument, by default all of
    its values.
    """
    parser = make_parser(module, description, rows.path.stem)
    parser.add_argument("--again", action="store_true", help="also run what has a row")
    parser.add_argument("--seeds", nargs="*", type=int, default=seeds, help="none: only print")
    for name, values in choices.items():
        parser.add_argument(f"--{name}", nargs="*", choices=values, default=values)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows.path = options.out
    rows.complete(find_runs(options), perform, again=options.again)
    print(markdown(read_rows(rows.path)))


def prepare_for_ranks() -> None:
    """Let a signal end this program as an exit does, which ends its ranks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # avoids DNS warnings in namespaces


def run_parts(
    area: str,
    description: str | None,
    parts: Parts,
    fields: Sequence[str],
    full: Any,
    dry: Any,
    **more: tuple[Any, str],
) -> None:
    """Run the parts that the command line of ``python -m benchmarks.<area>.bench`` names.

    Rows are printed and written after each batch, which a part, a function of the sizes, yields.
    ``more`` are arguments besides, which replace an attribute of the sizes: default and help.
    """
    parser = make_parser(f"{area}.bench", description, f"{area}-{machine()}")
    parser.epilog = f"""Rows go to benchmarks/results/{area}-<machine>.csv, replacing those of the
parts that were measured. python -m benchmarks.{area}.picture FILE.csv draws them."""
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, as a test")
    for name, (default, help_text) in more.items():
        parser.add_argument(f"--{name}", default=default, help=help_text)
    options = parser.parse_args()
    sizes = dry if options.dry_run else full
    for name in more:
        setattr(sizes, name, getattr(options, name))
    prepare_for_ranks()
    for part in options.parts:
        record(parts[part](sizes), options.out, fields)
    print(f"pictures: python -m benchmarks.{area}.picture {options.out}")
