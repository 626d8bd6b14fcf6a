"""The tasks of the comparisons, and training with a schedule in one process.

The weights that a microbatch reads, and the losses that a stage learns from, depend only on the
schedule. So runs do not depend on timing, and need one core.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from benchmarks.harness.learning_rate import rate as rate_at
from benchmarks.harness.learning_rate import set_rate
from benchmarks.harness.rows import Key, Row, as_text, shorten
from examples.data import as_tensor, cut_windows, draw_windows, load_digits, load_files
from examples.models import accuracy, build_transformer, byte_loss, digits_net
from pyparallel.comm import NonFiniteError
from pyparallel.pipeline import Correction, PipelineTrainer, Schedule

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[..., Optimizer]


@dataclass(frozen=True)
class Task:
    """A training task, with one update per batch.

    All schedules train at ``main_rate`` with all seeds; some also train at the other ``rates``,
    with all seeds or only ``sweep_seed``. Losses are in ``unit``, of which a nat has so many.
    """

    name: str
    make_optimizer: MakeOptimizer
    rates: tuple[float, ...]
    main_rate: float


@dataclass(frozen=True)
class Digits(Task):
    """scikit-learn's 1,797 digits of 8 x 8 pixels, 360 held out; a small convolutional net."""

    sweep_seed: int | None = None
    updates: int = 600
    batch_size: int = 32
    unit: str = "nats"
    units_per_nat: float = 1.0
    split: tuple[int, ...] = (2, 4, 7)

    loss = staticmethod(cross_entropy)

    def build(self) -> nn.Sequential:
        return digits_net()

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return training images and labels, then the held-out ones."""
        return load_images()

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield batches of reshuffled epochs; a remainder is carried over to the next epoch."""
        images, labels, _, _ = self.load()
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.long)
        while True:
            if len(order) < self.batch_size:
                order = torch.cat([order, torch.randperm(len(labels), generator=generator)])
            batch, order = order[: self.batch_size], order[self.batch_size :]
            yield images[batch], labels[batch]

    def held_out(self) -> Batch:
        """Return the last fifth of a fixed shuffle."""
        return self.load()[2:]

    def accuracy(self, model: nn.Module) -> float | None:
        return accuracy(model, *self.held_out())


load_images = cache(load_digits)


@dataclass(frozen=True)
class Bytes(Task):
    """The text of Python's standard library; embedding, transformer blocks, head."""

    sweep_seed: int | None = 0
    updates: int = 1500
    batch_size: int = 8
    context: int = 32
    width: int = 16
    num_layers: int = 2
    num_heads: int = 2
    num_held_out: int = 1024
    unit: str = "bits per byte"
    units_per_nat: float = 1 / math.log(2)
    split: tuple[int, ...] = (1, 2, 3)

    loss = staticmethod(byte_loss)

    def build(self) -> nn.Sequential:
        """Return a transformer; with two blocks it has four layers, one per stage."""
        return build_transformer(self.context, self.width, self.num_layers, self.num_heads)

    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            windows = draw_windows(load_text()[0], self.batch_size, self.context + 1, generator)
            yield windows[:, :-1], windows[:, 1:]

    def held_out(self) -> Batch:
        """Return evenly spaced windows of other files."""
        windows = cut_windows(load_text()[1], self.num_held_out, self.context + 1)
        return windows[:, :-1], windows[:, 1:]

    def accuracy(self, model: nn.Module) -> float | None:
        """Return None: it is not measured."""
        return None


@cache
def load_text() -> tuple[Tensor, Tensor]:
    train, held_out = load_files()
    return as_tensor(train), as_tensor(held_out)


TASKS = (
    Digits("digits-sgd", partial(torch.optim.SGD, momentum=0.9), (0.02, 0.04, 0.06, 0.1), 0.04),
    Bytes("bytes-adam", torch.optim.Adam, (1e-3, 3e-3, 1e-2, 3e-2), 3e-3),
    Bytes("bytes-adamw", torch.optim.AdamW, (3e-3,), 3e-3),
)

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


def runs_of(
    task: Task, contestants: Mapping[str, Contestant], swept: Container[str], seed: int
) -> Iterator[Run]:
    """Yield the runs of a seed: some contestants at all rates, the others at the main one."""
    for name, contestant in contestants.items():
        at_all = name in swept and task.sweep_seed in {None, seed}
        for rate in task.rates if at_all else (task.main_rate,):
            yield Run(task, name, contestant, rate, seed)


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
