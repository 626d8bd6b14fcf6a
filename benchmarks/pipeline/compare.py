"""``python -m benchmarks.pipeline.compare [--tasks digits-sgd] [--seeds 0 1 2]``.

Trains models in four stages with every schedule, and writes a row for each run that
``pipeline-accuracy.csv`` in ``benchmarks/results`` does not hold yet, then the table (``.md``) and
the picture (``.png``) of all rows beside it.

Every update is made from as many samples, at the same learning rate, for every schedule, and all
draw the same batches from the same first weights. So a batch is one microbatch where each of them
makes an update (PipeDream, SpecTrain, PipeOptim and naive), and is cut into four where those of a
call make one (GPipe, PipeDream-2BW, XPipe). GPipe's updates are those of training without a
pipeline; naive is PipeMare on live weights without either of its remedies.

One process holds all stages: which weights a microbatch sees follows from the schedule alone. So
runs do not depend on how fast anything is, and take one core.
"""

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.harness.measure import RESULTS
from benchmarks.harness.rows import read_rows
from benchmarks.pipeline.table import draw, markdown
from benchmarks.pipeline.tasks import TASKS, Task
from benchmarks.pipeline.training import Contestant, Run, complete, row_of
from pyparallel.pipeline import (
    GPipe,
    PipeDream,
    PipeDream2BW,
    PipeMare,
    PipeOptim,
    SpecTrain,
    XPipe,
)

CONTESTANTS = {
    "gpipe": Contestant(GPipe(), 4),
    "pipedream": Contestant(PipeDream(), 1),
    "2bw": Contestant(PipeDream2BW(), 4),
    "spectrain": Contestant(SpecTrain(), 1),
    "xpipe": Contestant(XPipe(), 4),
    "pipeoptim": Contestant(PipeOptim(), 1),
    "naive": Contestant(PipeMare(), 1),
}
SWEPT = ("gpipe", "pipedream", "pipeoptim", "naive")  # also at the rates beside the main one


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline.compare", description=__doc__
    )
    names = [task.name for task in TASKS]
    parser.add_argument("--tasks", nargs="*", choices=names, default=names)
    parser.add_argument(
        "--schedules", nargs="*", choices=list(CONTESTANTS), default=list(CONTESTANTS)
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="none: draw only")
    parser.add_argument("--updates", type=int, help="of every task, instead of its own number")
    parser.add_argument("--again", action="store_true", help="run what has a row, too")
    parser.add_argument("--out", type=Path, default=RESULTS / "pipeline-accuracy.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks = [task for task in TASKS if task.name in options.tasks]
    runs = (
        Run(task, name, CONTESTANTS[name], rate, seed)
        for seed, task in itertools.product(options.seeds, tasks)
        for name, rate in runs_of(task, options.schedules, seed)
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


def runs_of(task: Task, schedules: Iterable[str], seed: int) -> list[tuple[str, float]]:
    """Schedules and rates, for one seed."""
    swept = SWEPT if task.sweep_seed in {None, seed} else ()
    return [
        (name, rate)
        for name in schedules
        for rate in (task.rates if name in swept else (task.main_rate,))
    ]


if __name__ == "__main__":
    main()
