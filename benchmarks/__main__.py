"""``python -m benchmarks [--ops mix] [--sizes 16 20 25] [--turns 40]``: measure, print, record.

Rows go to ``benchmarks/results/<machine>.csv`` after every case, replacing those of its op, case
and size. ``python -m benchmarks.ops.picture FILE.csv`` draws them.
"""

import argparse
import importlib
import math
import re
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness.measure import FIELDS, Case, measure
from benchmarks.harness.rows import RESULTS, Row, machine, record

# The trainers' benchmarks run processes, and are programs of their own.
OPS = sorted(
    path.stem.removeprefix("bench_") for path in Path(__file__).with_name("ops").glob("bench_*.py")
)
CODECS, HOOKS = "codecs", "hooks"
# By device, what matters most first: a deadline may cut the rest.
SIZES = {"cpu": [16, 20, 25], "cuda": [27, 24, 20]}
LARGEST_EXPONENT = 64
LONGEST_CALL = {"cpu": math.inf, "cuda": 0.5}  # seconds; what takes longer runs once


def cases(
    device: str, sizes: list[int], names: list[str], pattern: str = ".*", *, peers: bool = True
) -> Iterator[Case]:
    """Yield the cases of ops whose whole names match a pattern."""
    for numel in sizes:
        for name in names:
            module = {CODECS: "compression.codecs", HOOKS: "ops.hooks"}.get(
                name, f"ops.bench_{name}"
            )
            bench = importlib.import_module(f"benchmarks.{module}")
            for case in bench.cases(device, [numel]):
                if re.fullmatch(pattern, case.name):
                    yield replace(case, providers=case.providers[: None if peers else 1])


def measure_all(
    options: argparse.Namespace, deadline: float, failed: list[str], late: list[str]
) -> Iterator[list[Row]]:
    """Yield the rows of each case; note those that fail, and the first beyond the deadline."""
    device = options.device
    sizes = [n if n > LARGEST_EXPONENT else 2**n for n in options.sizes or SIZES[device]]
    chosen = cases(device, sizes, options.ops, options.cases, peers=not options.no_peers)
    for case in chosen:
        name = f"{case.op}, {case.name}, {case.numel:,}"
        if time.monotonic() > deadline:
            late.append(f"out of time: not measured from {name} on")
            break
        try:
            measured = measure(case, options.turns, LONGEST_CALL[device])
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        yield measured
        if device == "cpu":
            torch._dynamo.reset()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=[*OPS, CODECS, HOOKS],
        default=OPS,
        help="measured in this order; codecs: of outer steps; hooks: the local work of DDP hooks",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", default=".*", help="a pattern of their names")
    help_text = f"exponents of two, or above {LARGEST_EXPONENT} numbers of elements, in this order"
    parser.add_argument("--sizes", nargs="+", type=int, help=help_text)
    parser.add_argument("--no-peers", action="store_true", help="measure ours and the copy alone")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no case is begun")
    parser.add_argument("--out", type=Path, help="another CSV file")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    # Compiled references are kept from size to size: each case of an op is one specialization.
    torch._dynamo.config.recompile_limit = 64
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads\n")
    path, failed, late = options.out or RESULTS / f"{machine()}.csv", list[str](), list[str]()
    batches = measure_all(options, deadline, failed, late)
    found = record(batches, path, FIELDS, key=("op", "case", "numel"))
    print(f"pictures: python -m benchmarks.ops.picture {path}")
    print(f"{len(found)} rows", *late, sep="; ")  # which ``make gpu`` repeats in its summary
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
