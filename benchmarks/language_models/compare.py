"""``python -m benchmarks.language_models.compare [--models ...] [--rates ...] [--again]``.

Do streaming pipelines train Hugging Face's models as well as synchronous updates do? GPT-2, its
embedding tied to the head, and Llama, each of 10 million parameters, from random weights, over
gloo: in two or four stages, a rank with one thread each, or in eight stages of one process, whose
updates are those of eight ranks. 1,000 updates of AdamW, or of Muon for the matrices of the blocks
and AdamW for the rest, each from 8 windows of 64 bytes of Python's standard library; gradients are
clipped, the learning rate warms up over the first tenth and decays as a cosine, and the streaming
schedules begin with one, three or five tenths of synchronous updates; one of them also with a
correction of the delay. All runs of a seed have the same initial weights and batches.
``OneForwardOneBackward``, whose updates are those of the unsplit model, has rows of two stages
only.

Rows go to ``benchmarks/results/language-models.csv``; those that are there are kept.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from benchmarks.harness.program import compare
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, RunRows, machine
from benchmarks.language_models.table import by_depth
from benchmarks.language_models.training import COMMON, MODELS, Training, adamw
from pyparallel import pipeline

FIELDS = [
    "model", "optimizer", "schedule", "ranks", "rate", "seed", "start", "parameters", "tied",
    "microbatches", "batch", "length", "steps", "training_bits", "held_out_bits", "losses",
    "seconds", "machine", "torch", "transformers", "commit",
]  # fmt: skip
LENGTH, HELD_OUT = 64, 128  # bytes of a window, held-out windows
STEPS = 1000
RATES = ["0.00025", "0.0005", "0.001", "0.002", "0.004"]
STARTS = ["100", "300", "500"]
SPLITS = {"2": [4], "4": [2, 4, 6], "8": range(1, 8)}  # of the embedding, six blocks and the head
CORRECTED = "PipeDream2BW with UpdateErrorFeedback"
SCHEDULES = ["OneForwardOneBackward", "PipeOptim", "PipeDream2BW", CORRECTED]


class Run(NamedTuple):
    """One training."""

    model: str
    optimizer: str
    schedule: str
    ranks: str
    rate: str
    seed: int
    start: str  # synchronous updates
    steps: int = STEPS

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self[:-1]))


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    chosen = options.models, options.optimizers, options.schedules, options.ranks, options.rates
    for seed, run in product(options.seeds, product(*chosen)):
        if run[2] != "OneForwardOneBackward":
            yield from (Run(*run, seed=seed, start=each) for each in options.starts)
        elif run[3] == "2":
            yield Run(*run, seed=seed, start="0")


def schedule_of(run: Run) -> tuple[pipeline.Schedule, int]:
    """Return a schedule and the microbatches of an update's batch."""
    if run.schedule == "OneForwardOneBackward":
        return pipeline.OneForwardOneBackward(), 4
    if run.schedule == "PipeOptim":
        return pipeline.PipeOptim(synchronous_updates=int(run.start)), 1
    # With as many microbatches as stages every stage is one update late.
    prediction = pipeline.Displacement()
    schedule = pipeline.PipeDream2BW(prediction=prediction, synchronous_updates=int(run.start))
    return schedule, int(run.ranks)


def muon(rate: float, parameters: Sequence[nn.Parameter]) -> list[Optimizer]:
    """Return Muon for the matrices of blocks, and AdamW for the rest."""
    tables = (COMMON["vocab_size"], LENGTH)  # rows of embeddings, and of the head
    matrices = [each for each in parameters if each.ndim == 2 and each.shape[0] not in tables]
    rest = [each for each in parameters if all(each is not other for other in matrices)]
    found: list[Optimizer] = [AdamW(rest, lr=rate)] if rest else []
    if matrices:  # a stage may have only an embedding
        found.append(Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw"))
    return found


OPTIMIZERS = {"AdamW": adamw, "Muon": muon}


def perform(run: Run) -> Row:
    sizes = LENGTH, HELD_OUT, run.steps, float(run.rate), run.seed, OPTIMIZERS[run.optimizer], 1.0
    training = Training(MODELS[run.model], *schedule_of(run), SPLITS[run.ranks], *sizes)
    if run.schedule == CORRECTED:
        training = replace(training, correction=pipeline.UpdateErrorFeedback())
    processes = 1 if run.ranks == "8" else int(run.ranks)
    *_, columns = run_on_loopback(processes, 120 + 60.0 * run.steps, training.run)
    return {**columns, "rate": run.rate, "machine": machine()}


if __name__ == "__main__":
    rows = RunRows(RESULTS / "language-models.csv", FIELDS, num_keys=7)
    choices = {"models": MODELS, "optimizers": OPTIMIZERS, "schedules": SCHEDULES, "ranks": SPLITS}
    chosen = {name: list(values) for name, values in choices.items()}
    chosen |= {"rates": RATES, "starts": STARTS}
    module = "language_models.compare"
    compare(module, __doc__, rows, find_runs, perform, by_depth, range(3), **chosen)
