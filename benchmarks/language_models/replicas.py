"""``python -m benchmarks.language_models.replicas [--methods ...] [--seeds 0]``.

Do replicas of an asynchronous pipeline learn as much from as many tokens? GPT-2 of 10 million
parameters, its embedding tied to the head, in two replicas of two stages over gloo: 400 updates of
a replica, each from 8 windows of 64 bytes of Python's standard library, clipped, with the rate of
``benchmarks.language_models.compare``. Synchronous updates by ``AdamW`` of the replicas' mean
gradient, and ``PipeOptim``, which begins with a tenth or three of synchronous updates, whose
replicas average their weights by ``SGP``. The held-out loss is of the replicas' average.

Rows go to ``benchmarks/results/language-model-replicas.csv``; those that are there are kept.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from benchmarks.harness.program import compare
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, RunRows, machine
from benchmarks.language_models.compare import FIELDS, HELD_OUT, LENGTH, OPTIMIZERS
from benchmarks.language_models.table import by_method
from benchmarks.language_models.training import MODELS, Training
from pyparallel import pipeline
from pyparallel.gossip import SGP, AllReduce

STEPS = 400
RATES = {"AdamW": 0.001, "Muon": 0.002}


class Run(NamedTuple):
    """One training."""

    method: str
    seed: int
    steps: int = STEPS

    @property
    def key(self) -> tuple[str, ...]:
        return self.method, str(self.seed)


def parts_of(run: Run) -> tuple[str, int, pipeline.Schedule, int, Any]:
    """Return the optimizer, synchronous updates, schedule, microbatches and algorithm."""
    optimizer = run.method.partition(", ")[0]
    if "AllReduce" in run.method:
        return optimizer, run.steps, pipeline.OneForwardOneBackward(), 4, AllReduce()
    start = run.steps * (3 if optimizer == "AdamW" else 1) // 10
    schedule = pipeline.PipeOptim(synchronous_updates=start)
    return optimizer, start, schedule, 1, SGP(overlap=1)


METHODS = ["AdamW, 1F1B, AllReduce", "AdamW, PipeOptim, SGP", "Muon, PipeOptim, SGP"]


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    for seed, method in product(options.seeds, options.methods):
        yield Run(method, seed)


def perform(run: Run) -> Row:
    optimizer, start, schedule, microbatches, algorithm = parts_of(run)
    rate = RATES[optimizer]
    training = Training(
        MODELS["GPT-2"], schedule, microbatches, [4], LENGTH, HELD_OUT, run.steps, rate, run.seed,
        OPTIMIZERS[optimizer], 1.0, algorithm,
    )  # fmt: skip
    found = run_on_loopback(4, 60 + 20.0 * run.steps, training.run)
    return found[-1] | {"model": "GPT-2", "ranks": "2 x 2", "start": start, "machine": machine()}


if __name__ == "__main__":
    fields = ["method", "seed", *(each for each in FIELDS if each not in {"schedule", "seed"})]
    rows = RunRows(
        RESULTS / "language-model-replicas.csv", [f for f in fields if f != "optimizer"], num_keys=2
    )
    module = "language_models.replicas"
    compare(module, __doc__, rows, find_runs, perform, by_method, [0], methods=METHODS)
