"""``python -m benchmarks [--ops mix] [--sizes 16 20 25] [--turns 40]``: measure, print, record.

Rows go to ``benchmarks/results/<machine>.csv``, replacing those of the ops that were measured.
``python -m benchmarks.ops.picture FILE.csv`` draws them.
"""

import argparse
import importlib
from pathlib import Path

import torch

from benchmarks.harness.measure import measure, print_rows, write_rows
from pyparallel import ops

# The trainers' benchmarks run processes, and are programs of their own.
OPS = sorted(
    path.stem
    for path in Path(ops.__file__).parent.glob("*.py")
    if Path(__file__).with_name("ops").joinpath(f"bench_{path.stem}.py").exists()
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", nargs="+", type=int, help="exponents of two")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--out", type=Path, help="another CSV file")
    options = parser.parse_args()
    sizes = [
        2**n
        for n in options.sizes or ([16, 20, 25] if options.device == "cpu" else [20, 24, 27, 30])
    ]
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads\n")
    rows: list[dict[str, object]] = []
    for op in options.ops:
        bench = importlib.import_module(f"benchmarks.ops.bench_{op}")
        for case in bench.cases(options.device, sizes):
            rows += measure(case, options.turns)
            torch._dynamo.reset()
    print_rows(rows)
    path = write_rows(rows, options.out)
    print(f"\nrows: {path}\npictures: python -m benchmarks.ops.picture {path}")


if __name__ == "__main__":
    main()
