"""``python -m benchmarks.pipeline.compare [--tasks digits-sgd] [--seeds 0 1 2]``.

Trains models in four stages with all schedules, and appends a row for each run that
``pipeline-accuracy.csv`` in ``benchmarks/results`` does not have yet, then prints the tables of all
rows.

All schedules use the same batch per update, the same learning rate, the same sequence of batches
and the same initial weights. So a batch is one microbatch for schedules that update after each
microbatch (PipeDream, SpecTrain, PipeOptim and naive), and four microbatches for those that update
once per step (GPipe, PipeDream-2BW, XPipe). GPipe's updates are those of training without a
pipeline; naive is PipeMare on live weights without either of its corrections.

One process holds all stages: the weights that a microbatch reads depend only on the schedule. So
runs do not depend on timing, and need one core.
"""

import argparse
import itertools
from collections.abc import Iterator

from benchmarks.harness.program import compare
from benchmarks.harness.rows import RESULTS, RunRows
from benchmarks.pipeline.table import markdown
from benchmarks.pipeline.tasks import FIELDS, TASKS, Contestant, Run, perform, runs_of
from pyparallel import pipeline

CONTESTANTS = {
    "gpipe": Contestant(pipeline.GPipe(), 4),
    "pipedream": Contestant(pipeline.PipeDream(), 1),
    "2bw": Contestant(pipeline.PipeDream2BW(), 4),
    "spectrain": Contestant(pipeline.SpecTrain(), 1),
    "xpipe": Contestant(pipeline.XPipe(), 4),
    "pipeoptim": Contestant(pipeline.PipeOptim(), 1),
    "naive": Contestant(pipeline.PipeMare(), 1),
}
SWEPT = ("gpipe", "pipedream", "pipeoptim", "naive")  # also at rates other than the main one


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    contestants = {name: CONTESTANTS[name] for name in options.schedules}
    for seed, task in itertools.product(options.seeds, TASKS):
        if task.name in options.tasks:
            yield from runs_of(task, contestants, SWEPT, seed)


if __name__ == "__main__":
    rows = RunRows(RESULTS / "pipeline-accuracy.csv", FIELDS, num_keys=4)
    choices = {"tasks": [task.name for task in TASKS], "schedules": list(CONTESTANTS)}
    compare("pipeline.compare", __doc__, rows, find_runs, perform, markdown, [0, 1, 2], **choices)
