"""``python -m benchmarks.interlocking.compare [--tasks digits] [--output_grads 0 1 2]``.

Trains models in four stages by interlocking backpropagation with windows from 1 (local learning) to
4 (end to end): each stage by the farthest loss in its window, with heads of one linear layer ("2")
and with deeper ones ("2 deep"), and by the mean of those losses ("2 mean"). Writes a row for each
run that ``interlocking-accuracy.csv`` in ``benchmarks/results`` does not hold yet, then the table
(``.md``) and the picture (``.png``) of all rows beside it.

All windows train at the same learning rate, which was chosen by end-to-end training with seed 0;
with that seed every window is tried at the other rates too. All draw the same batches from the
same first weights, heads included. One process holds all stages: what they learn is the same.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.harness.measure import RESULTS
from benchmarks.harness.rows import read_rows
from benchmarks.interlocking.table import draw, markdown
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
        "--seeds", nargs="*", type=int, default=[*range(NUM_SEEDS)], help="none: draw only"
    )
    parser.add_argument("--updates", type=int, help="of every task, instead of its own number")
    parser.add_argument("--again", action="store_true", help="run what has a row, too")
    parser.add_argument("--out", type=Path, default=RESULTS / "interlocking-accuracy.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trials = [trial for trial in TRIALS if trial.task.name in options.tasks]
    runs = (
        each
        for seed, trial in itertools.product(options.output_grads, trials)
        for each in runs_of(trial, options.windows, seed)
    )
    complete(
        options.out,
        runs,
        lambda run: row_of(run, options.updates or run.task.updates),
        again=options.again,
    )
    rows = read_rows(options.out)
    options.out.with_suffix(".md").write_text(markdown(rows))
    draw(rows, options.out.with_suffix(".png"))
    print(markdown(rows))


def runs_of(trial: Trial, names: Iterable[str], seed: int) -> Iterator[Run]:
    """All at the main rate; with one seed the paper's windows at the other rates too."""
    task, contestants = trial.task, trial.contestants()
    for name in names:
        swept = name in WINDOWS and seed == task.sweep_seed
        for rate in task.rates if swept else (task.main_rate,):
            yield Run(task, name, contestants[name], rate, seed)


if __name__ == "__main__":
    main()
