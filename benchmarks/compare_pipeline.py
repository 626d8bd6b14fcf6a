"""``python -m benchmarks.compare_pipeline [--tasks digits-sgd] [--seeds 0 1 2]``.

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
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, commit
from benchmarks.pipeline_table import draw, markdown
from benchmarks.pipeline_tasks import TASKS, Task
from benchmarks.rows import Key, Row, merge, read_rows, shorten, write_rows
from examples.learning_rate import rate as rate_at
from examples.learning_rate import set_rate
from pyparallel.pipeline import (
    GPipe,
    PipeDream,
    PipeDream2BW,
    PipelineTrainer,
    PipeMare,
    PipeOptim,
    Schedule,
    SpecTrain,
    StageError,
    XPipe,
)

FIELDS = [
    "task", "schedule", "rate", "seed", "options", "microbatches", "updates", "unit",
    "training_loss", "held_out_loss", "held_out_accuracy", "weight_copies", "torch", "commit",
    "losses",
]  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """A schedule, and how many microbatches make one of its updates."""

    schedule: Schedule
    microbatches: int


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


@dataclass(frozen=True)
class Outcome:
    """Losses in the task's unit, by update; infinite from where training broke down."""

    losses: list[float]
    held_out_loss: float
    held_out_accuracy: float | None
    weight_copies: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_pipeline", description=__doc__
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
    for seed, task in itertools.product(options.seeds, tasks):
        for name, rate in runs_of(task, options.schedules, seed):
            key = (task.name, name, f"{rate:g}", str(seed))
            if options.again or key not in map(key_of, read_rows(options.out)):
                print(*key, file=sys.stderr, flush=True)
                row = run(task, name, rate, seed, options.updates or task.updates)
                write_rows(merge(read_rows(options.out), row, key_of), options.out, FIELDS)
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


def run(task: Task, name: str, rate: float, seed: int, updates: int) -> Row:
    """Train once; what came of it, as a row."""
    contestant = CONTESTANTS[name]
    outcome = train(task, contestant, rate, seed, updates)
    last_tenth = outcome.losses[-(-updates * 9 // 10) :]
    accuracy = outcome.held_out_accuracy
    return {
        "task": task.name,
        "schedule": name,
        "rate": f"{rate:g}",
        "seed": str(seed),
        "options": repr(contestant.schedule),
        "microbatches": str(contestant.microbatches),
        "updates": str(updates),
        "unit": task.unit,
        "training_loss": f"{statistics.fmean(last_tenth):.5f}",
        "held_out_loss": f"{outcome.held_out_loss:.5f}",
        "held_out_accuracy": "" if accuracy is None else f"{accuracy:.5f}",
        "weight_copies": " ".join(map(str, outcome.weight_copies)),
        "torch": torch.__version__,
        "commit": commit(),
        "losses": " ".join(f"{loss:.4g}" for loss in shorten([outcome.losses])),
    }


def train(task: Task, contestant: Contestant, rate: float, seed: int, updates: int) -> Outcome:
    """A call makes one update."""
    torch.manual_seed(seed)
    model = task.build()
    trainer = PipelineTrainer(
        model,
        task.loss,
        lambda parameters: task.make_optimizer(parameters, lr=rate),
        contestant.schedule,
        num_microbatches=contestant.microbatches,
        split=task.split,
    )
    losses: list[float] = []
    held_out, accuracy = math.inf, None
    try:
        for update, batch in enumerate(itertools.islice(task.batches(seed), updates)):
            set_rate((stage.optimizer for stage in trainer.stages), rate * rate_at(update, updates))
            losses.append(task.units_per_nat * trainer.step(*batch))
        held_out = task.units_per_nat * trainer.evaluate(*task.held_out())
        accuracy = task.accuracy(model)
    except StageError as error:
        if not isinstance(error.__cause__, FloatingPointError):
            raise
    losses += [math.inf] * (updates - len(losses))
    return Outcome(losses, held_out, accuracy, trainer.peak_weight_copies)


def key_of(row: Row) -> Key:
    return row["task"], row["schedule"], row["rate"], row["seed"]


if __name__ == "__main__":
    main()
