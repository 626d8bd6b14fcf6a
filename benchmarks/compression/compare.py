"""``python -m benchmarks.compression.compare [--tasks digits] [--compressors int8-ef]``.

Trains with DistributedDataParallel and every compressor, each on the same batches from the same
initial weights as plain DistributedDataParallel (fp32). Writes a row for each run missing in
``compression-accuracy.csv`` in ``benchmarks/results``, then prints the tables of all rows.

Four gloo processes on the CPU, one thread each. All use the learning rates of fp32. DGC includes
SGD's momentum, so SGD has none there. On the text, trained by AdamW, aggressive compressors have a
second row, of a run whose first third or half is sent in bf16.
"""

import argparse
from dataclasses import dataclass

from benchmarks.compression import training
from benchmarks.compression.systems import describe
from benchmarks.compression.table import markdown
from benchmarks.harness.program import compare
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Key, Row, RunRows, as_text, shorten
from benchmarks.pipeline.tasks import Bytes, Digits
from pyparallel.planning.recommend import CANDIDATES, Candidate

FIELDS = [
    "task", "compressor", "seed", "options", "ranks", "steps", "measure", "score", "payload_bytes",
    "payload_share", "wire_bytes", "wire_share", "residual_norm", "torch", "commit", "losses",
]  # fmt: skip
SECONDS = 180  # a run's limit
SEEDS = {"digits": (0, 1, 2), "text": (0,)}


@dataclass(frozen=True)
class Run:
    """A run of so many updates."""

    task: Digits | Bytes
    candidate: Candidate
    seed: int
    updates: int
    ranks: int = 4

    @property
    def key(self) -> Key:
        return self.task.name, self.candidate.name, str(self.seed)


def find_runs(options: argparse.Namespace) -> list[Run]:
    return [
        Run(task, candidate, seed, task.updates)
        for task in training.TASKS
        if task.name in options.tasks
        for seed in (SEEDS[task.name] if options.seeds is None else options.seeds)
        for candidate in training.candidates_of(task)
        if candidate.name in options.compressors
    ]


def perform(run: Run) -> Row:
    arguments = (run.task, run.candidate.compressor, run.seed, run.updates)
    return columns_of(run, run_on_loopback(run.ranks, SECONDS, training.train, *arguments))


def columns_of(run: Run, ranks: list[training.Outcome]) -> Row:
    compressor, _ = training.fitted(run.task, run.candidate.compressor)
    outcome = ranks[0]
    dense_sent = training.dense_wire_bytes(outcome.dense_bytes, run.ranks)
    return {
        "options": describe(compressor),
        "ranks": str(run.ranks),
        "steps": str(run.updates),
        "measure": "test accuracy" if run.task.name == "digits" else "held-out bits per byte",
        "score": f"{outcome.score:.5f}",
        "payload_bytes": f"{outcome.payload_bytes:.0f}",
        "payload_share": f"{outcome.payload_bytes / outcome.dense_bytes:.4f}",
        "wire_bytes": f"{outcome.wire_bytes:.0f}",
        "wire_share": f"{outcome.wire_bytes / dense_sent:.4f}",
        "residual_norm": f"{outcome.residual_norm:.4g}",
        "losses": as_text(shorten([rank.losses for rank in ranks])),
    }


if __name__ == "__main__":
    rows = RunRows(RESULTS / "compression-accuracy.csv", FIELDS, num_keys=3)
    choices = {"tasks": [task.name for task in training.TASKS]}
    candidates = CANDIDATES + training.IN_SMALL_BLOCKS + training.WARMED
    choices["compressors"] = [candidate.name for candidate in candidates]
    compare("compression.compare", __doc__, rows, find_runs, perform, markdown, None, **choices)
