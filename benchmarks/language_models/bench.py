"""``python -m benchmarks.language_models.bench [--models ...] [--seeds 0] [--again]``.

Hugging Face's GPT-2, its embedding tied to the head, and Llama, each of more than 10 million
parameters, from random weights: unsplit in a plain loop with two threads, and on two gloo ranks
with a thread each under ``OneForwardOneBackward`` and ``PipeOptim``. All have the same initial
weights, batches, learning rates and updates: AdamW, an update for each batch of 8 windows of 128
bytes of Python's standard library, warm-up over the first tenth, cosine decay. A batch is four
microbatches of ``OneForwardOneBackward`` and one of ``PipeOptim``, which updates after each.

Rows go to ``benchmarks/results/language-models-<machine>.csv``; those that are there are kept.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from benchmarks.harness.program import compare
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, RunRows, machine
from benchmarks.language_models.table import UNSPLIT, markdown
from benchmarks.language_models.training import MODELS, Training
from pyparallel import pipeline

FIELDS = [
    "model", "schedule", "seed", "rate", "parameters", "tied", "ranks", "threads", "microbatches",
    "batch", "length", "steps", "training_bits", "held_out_bits", "losses",
    "torch", "transformers", "commit",
]  # fmt: skip
LENGTH, HELD_OUT = 128, 64  # bytes of a window, held-out windows
STEPS, RATE = 200, 1e-3
SPLIT = [4]  # the embedding and three of six blocks
# With the microbatches of a batch.
CONTESTANTS: dict[str, tuple[pipeline.Schedule | None, int]] = {
    UNSPLIT: (None, 1),
    "OneForwardOneBackward": (pipeline.OneForwardOneBackward(), 4),
    "PipeOptim": (pipeline.PipeOptim(), 1),
}


class Run(NamedTuple):
    """One training."""

    model: str
    schedule: str
    seed: int
    steps: int = STEPS

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.schedule, str(self.seed)


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    for model, seed, schedule in product(options.models, options.seeds, CONTESTANTS):
        yield Run(model, schedule, seed)


def perform(run: Run) -> Row:
    sizes = LENGTH, HELD_OUT, run.steps, RATE, run.seed
    training = Training(MODELS[run.model], *CONTESTANTS[run.schedule], SPLIT, *sizes)
    ranks = 1 if run.schedule == UNSPLIT else 2
    *_, columns = run_on_loopback(ranks, 60 + 10.0 * run.steps, training.run)
    del columns["seconds"]
    return {**columns, "ranks": ranks, "threads": 2 // ranks}


if __name__ == "__main__":
    rows = RunRows(RESULTS / f"language-models-{machine()}.csv", FIELDS, num_keys=3)
    choices = {"models": list(MODELS)}
    compare("language_models.bench", __doc__, rows, find_runs, perform, markdown, [0], **choices)
