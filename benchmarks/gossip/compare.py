"""``python -m benchmarks.gossip.compare [--data digits] [--algorithms sgp osgp] [--seeds 0 1 2]``.

Runs examples/train_gossip.py with every algorithm and seed that has no row yet in
``benchmarks/results/gossip-accuracy.csv``, and prints the tables of all rows.
``python -m benchmarks.gossip.picture FILE.csv`` draws them.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gossip.table import markdown
from benchmarks.harness.measure import RESULTS, commit
from benchmarks.harness.rows import Key, Row, merge, read_rows, shorten, write_rows

ALGORITHMS = [
    "allreduce", "sgp", "osgp", "osgp4", "dpsgd", "adpsgd", "localsgd", "slowmo", "diloco",
    "noloco", "leadersgd", "hierarchical",
]  # fmt: skip
FIELDS = [
    "data", "algorithm", "seed", "options", "ranks", "steps", "measure", "score", "worst_rank",
    "consensus_distance", "step_bytes", "step_seconds", "torch", "commit", "losses",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gossip.compare", description=__doc__
    )
    parser.add_argument("--data", nargs="+", choices=["digits", "text"], default=["digits", "text"])
    parser.add_argument("--algorithms", nargs="*", default=ALGORITHMS, help="none: print only")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--again", action="store_true", help="also run what has a row")
    parser.add_argument("--under", default="", help="a command to start each run with, as nice")
    parser.add_argument("--out", type=Path, default=RESULTS / "gossip-accuracy.csv")
    options = parser.parse_args()
    for seed in options.seeds:
        for data in options.data:
            for algorithm in options.algorithms:
                key = (data, algorithm, str(seed))
                if options.again or key not in map(key_of, read_rows(options.out)):
                    print(*key, flush=True)
                    row = run(*key, options.ranks, shlex.split(options.under))
                    write_rows(merge(read_rows(options.out), row, key_of), options.out, FIELDS)
    print(markdown(read_rows(options.out)))


def run(data: str, algorithm: str, seed: str, num_ranks: int, under: Sequence[str]) -> Row:
    """Train once and return the example's results as a row."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        example = ["--nproc-per-node", str(num_ranks), "examples/train_gossip.py"]
        arguments = ["--data", data, "--algorithm", algorithm, "--seed", seed, "--out", folder]
        subprocess.run(
            [*under, *torchrun, *example, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        results = json.loads((Path(folder) / "results.json").read_text())
    return as_row(data, algorithm, results)


def as_row(data: str, algorithm: str, results: dict) -> Row:
    scores = results["scores_of_ranks"]
    return {
        "data": data,
        "algorithm": algorithm,
        "seed": str(results["seed"]),
        "options": results["algorithm"],
        "ranks": str(results["num_ranks"]),
        "steps": str(results["num_steps"]),
        "measure": results["measure"],
        "score": f"{results['score']:.5f}",
        "worst_rank": f"{(min if data == 'digits' else max)(scores):.5f}",
        "consensus_distance": f"{results['consensus_distance']:.3g}",
        "step_bytes": f"{results['step_bytes']:.0f}",
        "step_seconds": f"{results['step_seconds']:.4f}",
        "torch": torch.__version__,
        "commit": commit(),
        "losses": " ".join(f"{loss:.4g}" for loss in shorten(results["losses_of_ranks"])),
    }


def key_of(row: Row) -> Key:
    return row["data"], row["algorithm"], row["seed"]


if __name__ == "__main__":
    main()
