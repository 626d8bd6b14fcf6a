"""``python -m benchmarks [--ops mix] [--sizes 16 20 25] [--turns 40]``: measure, print, record.

Rows go to ``benchmarks/results/<machine>.csv`` after every case, replacing those of its op, case
and size. ``python -m benchmarks.ops.picture FILE.csv`` draws them.
"""

import argparse
import importlib
import math
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness.measure import FIELDS, Case, measure, print_header, print_rows
from benchmarks.harness.rows import RESULTS, machine, replace_rows

# The trainers' benchmarks run processes, and are programs of their own.
OPS = sorted(
    path.stem.removeprefix("bench_") for path in Path(__file__).with_name("ops").glob("bench_*.py")
)
HOOKS = "hooks"
# By device, what matters most first: a deadline may cut the rest.
SIZES = {"cpu": [16, 20, 25], "cuda": [27, 24, 20, 30]}
LONGEST_CALL = {"cpu": math.inf, "cuda": 0.5}  # seconds; what takes longer runs once
# Above this size only ops of one pass are measured, without peers.
LARGEST_WITH_PEERS = 2**27
ONE_PASS = {"adamw_step", "mix", "predict_adam", "predict_sgd", "quantize", "sgd_step"}


def cases(device: str, sizes: list[int], names: list[str], *, peers: bool = True) -> Iterator[Case]:
    for numel in sizes:
        large = numel > LARGEST_WITH_PEERS
        for name in names:
            if large and name not in ONE_PASS:
                continue
            module = f"bench_{name}" if name in OPS else name
            bench = importlib.import_module(f"benchmarks.ops.{module}")
            for case in bench.cases(device, [numel]):
                providers = case.providers[: None if peers and not large else 1]
                yield replace(case, providers=providers)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=[*OPS, HOOKS],
        default=OPS,
        help="measured in this order; hooks: the local work of DDP hooks",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", nargs="+", type=int, help="exponents of two, in this order")
    parser.add_argument("--no-peers", action="store_true", help="measure ours and the copy alone")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no case is begun")
    parser.add_argument("--out", type=Path, help="another CSV file")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    sizes = [2**n for n in options.sizes or SIZES[options.device]]
    # Compiled references are kept from size to size: each case of an op is one specialization.
    torch._dynamo.config.recompile_limit = 64
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads\n")
    print_header()
    path, count, failed, late = options.out or RESULTS / f"{machine()}.csv", 0, [], ""
    for case in cases(options.device, sizes, options.ops, peers=not options.no_peers):
        if time.monotonic() > deadline:
            late = f"; out of time: not measured from {case.op}, {case.name}, {case.numel:,} on"
            break
        try:
            measured = measure(case, options.turns, LONGEST_CALL[options.device])
        except Exception:
            traceback.print_exc()
            failed.append(f"{case.op}, {case.name}, {case.numel:,}")
            continue
        print_rows(measured)
        count += len(measured)
        replace_rows(measured, path, FIELDS, key=("op", "case", "numel"))
        if options.device == "cpu":
            torch._dynamo.reset()
    print(f"\npictures: python -m benchmarks.ops.picture {path}")
    print(f"{count} rows: {path}{late}")
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
