"""``python -m benchmarks.interlocking.compare [--tasks digits] [--seeds 0 1 2]``.

Trains models in four stages by interlocking backpropagation with windows from 1 (local learning) to
4 (end to end): each stage learns from the farthest loss in its window, with linear heads ("2") or
deeper ones ("2 deep"), or from the mean of those losses ("2 mean"). Appends a row for each run that
``interlocking-accuracy.csv`` in ``benchmarks/results`` does not have yet, then prints the tables of
all rows. ``python -m benchmarks.interlocking.picture FILE.csv`` draws them.

All windows train at the same learning rate, the best of end-to-end training with seed 0; with that
seed all windows are also trained at the other rates. All use the same batches and the same initial
weights, heads included. One process holds all stages, which does not change the results.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.harness.measure import RESULTS
from benchmarks.harness.rows import read_rows
from benchmarks.interlocking.table import markdown
from benchmarks.interlocking.tasks import NUM_STAGES, TRIALS, Trial
from benchmarks.pipeline.training import Run, complete, row_of

WINDOWS = {str(window) for window in range(1, NUM_STAGES + 1)}
NUM_SEEDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interlocking.compare", description=__doc__
    )
    names = [trial.task.name for trial in TRIALS]
    parser.add_argument("--tasks", nargs="*", choices=names, default=names)
    windows = list(TRIALS[0].contestants())
    parser.add_argument("--windows", nargs="*", choices=windows, default=windows)
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=[*range(NUM_SEEDS)], help="none: only print"
    )
    parser.add_argument("--updates", type=int, help="overrides the number of updates of each task")
    parser.add_argument("--again", action="store_true", help="repeat runs that have a row")
    parser.add_argument("--out", type=Path, default=RESULTS / "interlocking-accuracy.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trials = [trial for trial in TRIALS if trial.task.name in options.tasks]
    runs = (
        each
        for seed, trial in itertools.product(options.seeds, trials)
        for each in runs_of(trial, options.windows, seed)
    )
    complete(
        options.out,
        runs,
        lambda run: row_of(run, options.updates or run.task.updates),
        again=options.again,
    )
    print(markdown(read_rows(options.out)))


def runs_of(trial: Trial, names: Iterable[str], seed: int) -> Iterator[Run]:
    """Yield all windows at the main rate; with one seed the paper's windows at all rates."""
    task, contestants = trial.task, trial.contestants()
    for name in names:
        swept = name in WINDOWS and seed == task.sweep_seed
        for rate in task.rates if swept else (task.main_rate,):
            yield Run(task, name, contestants[name], rate, seed)


if __name__ == "__main__":
    main()
