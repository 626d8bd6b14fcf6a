"""What compare_subnets.py trains: wide layers on digits, transformer blocks on bytes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.tasks import load_images, load_text
from examples.byte_transformer import build_transformer, byte_loss
from examples.standard_library import cut_windows, draw_windows
from pyparallel.subnets import FeedForward, Heads, Partition

Batch = tuple[Tensor, Tensor]
BLOCK = [Heads(qkv="qkv", project="project"), FeedForward("mlp.0", "mlp.2")]


class Task(Protocol):
    """Something to learn, of which no two ranks see the same part."""

    name: str
    measure: str

    def build(self) -> nn.Module:
        """The whole model, from torch's global generator."""

    def partition(self) -> Partition:
        """How subnets are cut out of it."""

    def batches(self, seed: int) -> Iterator[Batch]:
        """Of this rank's part, without end."""

    def calibration(self) -> list[Tensor]:
        """Inputs of this rank's part by which running statistics are measured."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over a batch, in nats."""

    def score(self, module: nn.Module) -> float:
        """On what no rank trains on."""


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 digits, 360 held out; two hidden widths with BatchNorm.

    Args:
        width: hidden units of both layers; the weights between them are most of the model.
        batch_size: images a rank and step.
    """

    width: int = 1024
    batch_size: int = 64
    name: str = "digits"
    measure: str = "test accuracy"

    def build(self) -> nn.Sequential:
        """64 inputs, two hidden layers, 10 outputs."""
        width = self.width
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip

    def partition(self) -> Partition:
        """Both hidden widths; a chain of layers needs no rules."""
        return Partition()

    def batches(self, seed: int) -> Iterator[Batch]:
        """Epoch after epoch, each in an order of its own; what is left over is left out."""
        images, labels = self._mine()
        generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
        while True:
            order = torch.randperm(len(labels), generator=generator)
            for batch in order.split(self.batch_size):
                if len(batch) == self.batch_size:
                    yield images[batch], labels[batch]

    def calibration(self) -> list[Tensor]:
        """All."""
        return [self._mine()[0]]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(output, target)

    def score(self, module: nn.Module) -> float:
        """The part that is read right."""
        _, _, images, labels = load_images()
        return float((module(images).argmax(1) == labels).float().mean())

    def _mine(self) -> Batch:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        images, labels, _, _ = load_images()
        return images[rank::num_ranks], labels[rank::num_ranks]


@dataclass(frozen=True)
class Bytes:
    """The text of Python's standard library; transformer blocks cut by heads and hidden units."""

    width: int = 128
    num_layers: int = 2
    context: int = 64
    batch_size: int = 8
    name: str = "bytes"
    measure: str = "held-out bits per byte"

    def build(self) -> nn.Sequential:
        """Embedding, blocks with 8 heads, head."""
        return build_transformer(self.context, self.width, self.num_layers, num_heads=8)

    def partition(self) -> Partition:
        """Heads and hidden units of the blocks; what is around them is shared."""
        return Partition({f"{place}": BLOCK for place in range(1, 1 + self.num_layers)})

    def batches(self, seed: int) -> Iterator[Batch]:
        """Windows from anywhere in this rank's part."""
        text, _ = load_text()
        mine = text.tensor_split(dist.get_world_size())[dist.get_rank()]
        generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
        while True:
            windows = draw_windows(mine, self.batch_size, self.context + 1, generator)
            yield windows[:, :-1], windows[:, 1:]

    def calibration(self) -> list[Tensor]:
        """None: there is no BatchNorm."""
        return []

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return byte_loss(output, target)

    def score(self, module: nn.Module) -> float:
        """The mean over windows of other files."""
        windows = cut_windows(load_text()[1], 256, self.context + 1)
        losses = [byte_loss(module(part[:, :-1]), part[:, 1:]) for part in windows.split(64)]
        return float(torch.stack(losses).mean()) / math.log(2)
