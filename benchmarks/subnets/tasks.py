"""The tasks of compare.py: wide layers on digits, transformer blocks on bytes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.pipeline.tasks import load_images, load_text
from examples.data import cut_windows, draw_windows
from examples.models import build_transformer, byte_loss
from pyparallel.subnets import FeedForward, Heads, Partition

Batch = tuple[Tensor, Tensor]
BLOCK = [Heads(qkv="qkv", project="project"), FeedForward("mlp.0", "mlp.2")]


class Task:
    """A task with disjoint training data on every rank.

    ``build()`` returns the full model, initialized from torch's global generator, ``batches(seed)``
    yields batches of this rank's data endlessly, ``score(module)`` is on held-out data.
    """

    name: str
    measure: str

    def partition(self) -> Partition:
        return Partition()

    def calibration(self) -> list[Tensor]:
        """Return inputs of this rank's data for recalibrating running statistics, if any."""
        return []


@dataclass(frozen=True)
class Digits(Task):
    """scikit-learn's 1,797 digits, 360 held out; two hidden dimensions with BatchNorm."""

    width: int = 1024  # hidden units of both layers; the weights between them are most of the model
    batch_size: int = 64  # images per rank and step
    name: str = "digits"
    measure: str = "test accuracy"

    loss = staticmethod(nn.functional.cross_entropy)

    def build(self) -> nn.Sequential:
        width = self.width
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield shuffled epochs without their incomplete last batch."""
        images, labels = self._mine()
        generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
        while True:
            order = torch.randperm(len(labels), generator=generator)
            for batch in order.split(self.batch_size):
                if len(batch) == self.batch_size:
                    yield images[batch], labels[batch]

    @override
    def calibration(self) -> list[Tensor]:
        return [self._mine()[0]]

    def score(self, module: nn.Module) -> float:
        _, _, images, labels = load_images()
        return float((module(images).argmax(1) == labels).float().mean())

    def _mine(self) -> Batch:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        images, labels, _, _ = load_images()
        return images[rank::num_ranks], labels[rank::num_ranks]


@dataclass(frozen=True)
class Bytes(Task):
    """The text of Python's standard library; transformer blocks cut by heads and hidden units."""

    width: int = 128
    num_layers: int = 2
    context: int = 64
    batch_size: int = 8
    name: str = "bytes"
    measure: str = "held-out bits per byte"

    loss = staticmethod(byte_loss)

    def build(self) -> nn.Sequential:
        return build_transformer(self.context, self.width, self.num_layers, num_heads=8)

    @override
    def partition(self) -> Partition:
        return Partition({f"{place}": BLOCK for place in range(1, 1 + self.num_layers)})

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield random windows of this rank's part of the text."""
        text, _ = load_text()
        mine = text.tensor_split(dist.get_world_size())[dist.get_rank()]
        generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
        while True:
            windows = draw_windows(mine, self.batch_size, self.context + 1, generator)
            yield windows[:, :-1], windows[:, 1:]

    def score(self, module: nn.Module) -> float:
        windows = cut_windows(load_text()[1], 256, self.context + 1)
        losses = [byte_loss(module(part[:, :-1]), part[:, 1:]) for part in windows.split(64)]
        return float(torch.stack(losses).mean()) / math.log(2)
