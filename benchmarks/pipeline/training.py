"""Training with a schedule in one process, and the row of each run.

The weights that a microbatch reads, and the losses that a stage learns from, depend only on the
schedule. So runs do not depend on timing, and need one core.
"""

import itertools
import math
import statistics
from dataclasses import dataclass

import torch

from benchmarks.harness.learning_rate import rate as rate_at
from benchmarks.harness.learning_rate import set_rate
from benchmarks.harness.rows import Key, Row, as_text, shorten
from benchmarks.pipeline.tasks import Task
from pyparallel.comm import NonFiniteError
from pyparallel.pipeline import Correction, PipelineTrainer, Schedule

FIELDS = [
    "task", "schedule", "rate", "seed", "options", "microbatches", "updates", "unit",
    "training_loss", "held_out_loss", "held_out_accuracy", "weight_copies", "torch", "commit",
    "losses",
]  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """A schedule, the number of microbatches per update, and a correction of delayed gradients."""

    schedule: Schedule
    microbatches: int
    correction: Correction | None = None


@dataclass(frozen=True)
class Outcome:
    """Losses in the task's unit, by update; infinite after divergence."""

    losses: list[float]
    held_out_loss: float
    held_out_accuracy: float | None
    weight_copies: list[int]

    @property
    def training_loss(self) -> float:
        """Mean of the last tenth."""
        return statistics.fmean(self.losses[len(self.losses) * 9 // 10 :])

    @property
    def columns(self) -> Row:
        return {
            "weight_copies": " ".join(map(str, self.weight_copies)),
            "losses": as_text(shorten([self.losses])),
        }


@dataclass(frozen=True)
class Run:
    """A run, which has one row: a task, a schedule, a learning rate and a seed."""

    task: Task
    name: str
    contestant: Contestant
    rate: float
    seed: int

    @property
    def key(self) -> Key:
        return self.task.name, self.name, f"{self.rate:g}", str(self.seed)


def perform(run: Run, updates: int | None = None) -> Row:
    updates = updates or run.task.updates
    outcome = train(run.task, run.contestant, run.rate, run.seed, updates)
    accuracy = outcome.held_out_accuracy
    return {
        **outcome.columns,
        "options": repr(run.contestant.schedule),
        "microbatches": str(run.contestant.microbatches),
        "updates": str(updates),
        "unit": run.task.unit,
        "training_loss": f"{outcome.training_loss:.5f}",
        "held_out_loss": f"{outcome.held_out_loss:.5f}",
        "held_out_accuracy": "" if accuracy is None else f"{accuracy:.5f}",
    }


def train(
    task: Task, contestant: Contestant, rate: float, seed: int, updates: int, warm_up: float = 0.05
) -> Outcome:
    """Train with one update per step; ``warm_up``: the fraction of updates with a rising rate."""
    torch.manual_seed(seed)
    model = task.build()
    trainer = PipelineTrainer(
        model,
        task.loss,
        lambda parameters: task.make_optimizer(parameters, lr=rate),
        contestant.schedule,
        num_microbatches=contestant.microbatches,
        split=task.split,
        correction=contestant.correction,
    )
    losses: list[float] = []
    held_out, accuracy = math.inf, None
    try:
        for update, batch in enumerate(itertools.islice(task.batches(seed), updates)):
            trainer.prepare(*batch)  # heads are built for the first batch
            optimizers = (each for stage in trainer.stages for each in stage.optimizers)
            set_rate(optimizers, rate * rate_at(update, updates, warm_up))
            losses.append(task.units_per_nat * trainer.step(*batch))
        held_out = task.units_per_nat * trainer.evaluate(*task.held_out())
        accuracy = task.accuracy(model)
    except NonFiniteError:
        held_out, accuracy = math.inf, None  # it diverges: infinite losses from here on
    losses += [math.inf] * (updates - len(losses))
    return Outcome(losses, held_out, accuracy, trainer.peak_weight_copies)
