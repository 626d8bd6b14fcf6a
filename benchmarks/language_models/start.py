"""``python -m benchmarks.language_models.start [--lengths ...] [--clips ...]``.

How long must the synchronous start of ``PipeOptim`` be? Hugging Face's GPT-2 of a million
parameters, its embedding tied to the head, in two stages on two gloo ranks of one thread: AdamW,
200 or 1,000 updates, each from 8 windows of 64 bytes of Python's standard library, warm-up over the
first tenth, cosine decay; with and without clipping. ``OneForwardOneBackward``, four microbatches
an update, all synchronous, is what the others are compared with.

Rows go to ``benchmarks/results/synchronous-start.csv``; those that are there are kept.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from benchmarks.harness.program import compare
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, RunRows, machine
from benchmarks.language_models.bench import RATE
from benchmarks.language_models.table import by_start
from benchmarks.language_models.training import Training, build_gpt2
from pyparallel.pipeline import OneForwardOneBackward, PipeOptim, Schedule

FIELDS = [
    "schedule", "start", "clip", "seed", "steps", "rate", "parameters", "batch", "length",
    "held_out_bits", "seconds", "machine", "torch", "transformers", "commit",
]  # fmt: skip
LENGTH, HELD_OUT = 64, 128  # bytes of a window, held-out windows
STARTS = {"200": [0, 10, 20, 50, 100], "1000": [0, 20, 50, 100, 200, 300]}  # by updates
SPLIT = [3]  # the embedding and two of four blocks


class Run(NamedTuple):
    """One training; ``start`` is "all" where every update is synchronous."""

    schedule: str
    start: str
    clip: str
    seed: int
    steps: str

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self))


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    for steps, seed, clip in product(options.lengths, options.seeds, options.clips):
        yield Run("OneForwardOneBackward", "all", clip, seed, steps)
        for start in STARTS[steps]:
            yield Run("PipeOptim", str(start), clip, seed, steps)


def perform(run: Run) -> Row:
    schedule: tuple[Schedule, int] = OneForwardOneBackward(), 4
    if run.start != "all":
        schedule = PipeOptim(synchronous_updates=int(run.start)), 1
    build = partial(build_gpt2, width=144, num_layers=4, num_heads=4)
    norm = float(run.clip) if run.clip else None
    steps = int(run.steps)
    sizes = LENGTH, HELD_OUT, steps, RATE, run.seed
    training = Training(build, *schedule, SPLIT, *sizes, max_norm=norm)
    *_, columns = run_on_loopback(2, 60 + 2.0 * steps, training.run)
    return {name: columns[name] for name in FIELDS if name in columns} | {"machine": machine()}


if __name__ == "__main__":
    rows = RunRows(RESULTS / "synchronous-start.csv", FIELDS, num_keys=5)
    choices = {"lengths": list(STARTS), "clips": ["", "1.0"]}
    compare(
        "language_models.start", __doc__, rows, find_runs, perform, by_start, range(3), **choices
    )
