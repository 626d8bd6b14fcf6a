"""``python -m benchmarks.compression.compare [--tasks digits] [--compressors int8-ef]``.

Trains with DistributedDataParallel and every compressor, each on the same batches from the same
initial weights as plain DistributedDataParallel (fp32). Writes a row for each run missing in
``compression-accuracy.csv`` in ``benchmarks/results``, then prints the tables of all rows.
``python -m benchmarks.compression.picture FILE.csv`` draws them.

Four gloo processes on the CPU, one thread each. All use the learning rates of fp32. DGC includes
SGD's momentum, so SGD has none there. On the text, trained by AdamW, aggressive compressors have a
second row, of a run whose first third or half is sent in bf16.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.compression.systems import describe
from benchmarks.compression.table import markdown
from benchmarks.compression.tasks import IN_SMALL_BLOCKS, TASKS, WARMED, candidates_of, fitted
from benchmarks.compression.training import Outcome, dense_wire_bytes, train
from benchmarks.harness.link import loopback
from benchmarks.harness.measure import RESULTS, commit
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.rows import Key, Row, merge, read_rows, shorten, write_rows
from benchmarks.pipeline.tasks import Task
from pyparallel.recommend import CANDIDATES, Candidate

FIELDS = [
    "task", "compressor", "seed", "options", "ranks", "steps", "measure", "score", "payload_bytes",
    "payload_share", "wire_bytes", "wire_share", "residual_norm", "torch", "commit", "losses",
]  # fmt: skip
SECONDS = 180  # a run's limit
SEEDS = {"digits": (0, 1, 2), "text": (0,)}


@dataclass(frozen=True)
class Job:
    """A run."""

    task: Task
    candidate: Candidate
    seed: int
    updates: int

    @property
    def key(self) -> Key:
        """Key of its row."""
        return self.task.name, self.candidate.name, str(self.seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compression.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tasks, names = (
        [each.name for each in all_of] for all_of in (TASKS, CANDIDATES + IN_SMALL_BLOCKS + WARMED)
    )
    parser.add_argument("--tasks", nargs="*", choices=tasks, default=tasks)
    parser.add_argument("--compressors", nargs="*", choices=names, default=names)
    parser.add_argument("--seeds", nargs="*", type=int, help="none: print only")
    parser.add_argument("--updates", type=int, help="of every task, instead of its own number")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--again", action="store_true", help="run what has a row, too")
    parser.add_argument("--out", type=Path, default=RESULTS / "compression-accuracy.csv")
    options = parser.parse_args()
    done = set() if options.again else set(map(key_of, read_rows(options.out)))
    jobs = [job for job in find_jobs(options) if job.key not in done]
    for _, group in itertools.groupby(jobs, key=lambda job: (job.task.name, job.seed)):
        run(list(group), options.ranks, options.out)
    print(markdown(read_rows(options.out)))


def find_jobs(options: argparse.Namespace) -> list[Job]:
    """Return the jobs in order, by task and seed."""
    return [
        Job(task, candidate, seed, options.updates or task.updates)
        for task in TASKS
        if task.name in options.tasks
        for seed in (SEEDS[task.name] if options.seeds is None else options.seeds)
        for candidate in candidates_of(task)
        if candidate.name in options.compressors
    ]


def run(jobs: Sequence[Job], num_ranks: int, path: Path) -> None:
    """Run jobs in the same processes, which take seconds to start."""
    with loopback() as place:
        run_ranks(num_ranks, place, SECONDS * len(jobs), run_rank, jobs, num_ranks, path)


def run_rank(rank: int, jobs: Sequence[Job], num_ranks: int, path: Path) -> None:
    """Run the jobs; rank 0 writes each row at once."""
    for job in jobs:
        outcome = train(job.task, job.candidate.compressor, job.seed, job.updates)
        if rank == 0:
            print(*job.key, f"{outcome.score:.4f}", file=sys.stderr, flush=True)
            row = as_row(job, outcome, num_ranks)
            write_rows(merge(read_rows(path), row, key_of), path, FIELDS)


def as_row(job: Job, outcome: Outcome, num_ranks: int) -> Row:
    compressor, _ = fitted(job.task, job.candidate.compressor)
    dense_sent = dense_wire_bytes(outcome.dense_bytes, num_ranks)
    return {
        "task": job.task.name,
        "compressor": job.candidate.name,
        "seed": str(job.seed),
        "options": describe(compressor),
        "ranks": str(num_ranks),
        "steps": str(job.updates),
        "measure": "test accuracy" if job.task.name == "digits" else "held-out bits per byte",
        "score": f"{outcome.score:.5f}",
        "payload_bytes": f"{outcome.payload_bytes:.0f}",
        "payload_share": f"{outcome.payload_bytes / outcome.dense_bytes:.4f}",
        "wire_bytes": f"{outcome.wire_bytes:.0f}",
        "wire_share": f"{outcome.wire_bytes / dense_sent:.4f}",
        "residual_norm": f"{outcome.residual_norm:.4g}",
        "torch": torch.__version__,
        "commit": commit(),
        "losses": " ".join(f"{loss:.4g}" for loss in shorten(outcome.losses)),
    }


def key_of(row: Row) -> Key:
    return row["task"], row["compressor"], row["seed"]


if __name__ == "__main__":
    main()
