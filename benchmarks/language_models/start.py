"""``python -m benchmarks.language_models.start [--seeds ...] [--again]``.

How long must the synchronous start of ``PipeOptim`` be? Hugging Face's GPT-2 of a million
parameters, its embedding tied to the head, in two stages of one process, whose updates are those of
two ranks: AdamW, 200 updates, each from 8 windows of 64 bytes of Python's standard library, warm-up
over the first tenth, cosine decay; with and without clipping. ``OneForwardOneBackward``, whose
updates are all synchronous, is what the others are compared with.

Rows go to ``benchmarks/results/synchronous-start.csv``; those that are there are kept.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from benchmarks.harness.program import compare
from benchmarks.harness.rows import RESULTS, Row, RunRows
from benchmarks.language_models.bench import RATE
from benchmarks.language_models.table import by_start
from benchmarks.language_models.training import Training, build_gpt2
from pyparallel.pipeline import OneForwardOneBackward, PipeOptim, Schedule

FIELDS = [
    "schedule", "start", "clip", "seed", "rate", "parameters", "batch", "length", "steps",
    "held_out_bits", "torch", "transformers", "commit",
]  # fmt: skip
LENGTH, HELD_OUT, STEPS = 64, 64, 200
STARTS = [0, 10, 20, 50, 100]
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
    for seed, clip, (schedule, start) in product(options.seeds, ("", "1.0"), starts):
        yield Run(schedule, start, clip, seed)


def perform(run: Run) -> Row:
    schedule: Schedule = OneForwardOneBackward()
    if run.start != "all":
        schedule = PipeOptim(synchronous_updates=int(run.start))
    build = partial(build_gpt2, width=144, num_layers=4, num_heads=4)
    norm = float(run.clip) if run.clip else None
    sizes = LENGTH, HELD_OUT, STEPS, RATE, run.seed
    columns = Training(build, schedule, 1, SPLIT, *sizes, max_norm=norm).run()
    return {name: columns[name] for name in FIELDS if name in columns}


if __name__ == "__main__":
    rows = RunRows(RESULTS / "synchronous-start.csv", FIELDS, num_keys=4)
    compare("language_models.start", __doc__, rows, find_runs, perform, by_start, range(3))
