"""``python -m benchmarks.language_models.start [--clips ...] [--again]``.

How long must the synchronous start of ``PipeOptim`` be? Hugging Face's GPT-2 of a million
parameters, its embedding tied to the head, in two stages on two gloo ranks of one thread: AdamW,
1,000 updates, each from 8 windows of 64 bytes of Python's standard library, warm-up over the first
tenth, cosine decay; with and without clipping. ``OneForwardOneBackward`` with four microbatches an
update, which are all synchronous, is what the others are compared with.

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
    "schedule", "start", "clip", "seed", "rate", "parameters", "batch", "length", "steps",
    "held_out_bits", "seconds", "machine", "torch", "transformers", "commit",
]  # fmt: skip
LENGTH, HELD_OUT, STEPS = 64, 128, 1000
STARTS = [0, 20, 50, 100, 200, 300]
SPLIT = [3]  # the embedding and two of four blocks


class Run(NamedTuple):
    """One training; ``start`` is "all" where every update is synchronous."""

    schedule: str
    start: str
    clip: str
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self))


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    starts = [("OneForwardOneBackward", "all"), *(("PipeOptim", str(start)) for start in STARTS)]
    for seed, clip, (schedule, start) in product(options.seeds, options.clips, starts):
        yield Run(schedule, start, clip, seed)


def perform(run: Run) -> Row:
    schedule: tuple[Schedule, int] = OneForwardOneBackward(), 4
    if run.start != "all":
        schedule = PipeOptim(synchronous_updates=int(run.start)), 1
    build = partial(build_gpt2, width=144, num_layers=4, num_heads=4)
    norm = float(run.clip) if run.clip else None
    sizes = LENGTH, HELD_OUT, STEPS, RATE, run.seed
    training = Training(build, *schedule, SPLIT, *sizes, max_norm=norm)
    *_, columns = run_on_loopback(2, 60 + 2.0 * STEPS, training.run)
    return {name: columns[name] for name in FIELDS if name in columns} | {"machine": machine()}


if __name__ == "__main__":
    rows = RunRows(RESULTS / "synchronous-start.csv", FIELDS, num_keys=4)
    module, clips = "language_models.start", ["", "1.0"]
    compare(module, __doc__, rows, find_runs, perform, by_start, range(3), clips=clips)
