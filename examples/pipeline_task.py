"""The protocol of the tasks of train_pipeline.py: a model in layers, and data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pyparallel.pipeline import Head

Batch = tuple[Tensor, Tensor]  # inputs and target


@dataclass(frozen=True)
class Data:
    """The data of a task, the same on all ranks.

    Args:
        batches: training batches, forever.
        held_out: the held-out batch.
        size: description for the table.
    """

    batches: Iterator[Batch]
    held_out: Batch
    size: str


class Task(Protocol):
    """Protocol of a training task.

    Args:
        num_layers: of the model, the maximum number of stages.
        layers: description of the layers.
        loss_unit: unit of the printed losses.
        per_nat: loss units per nat.
        item: name of the items that are counted.
        batch_size: samples per step.
        step_items: items per step.
        rates: learning rate of each optimizer.
        head: of all stages but the last, for interlocking.
    """

    num_layers: int
    layers: str
    loss_unit: str
    per_nat: float
    item: str
    batch_size: int
    step_items: int
    rates: dict[str, float]
    head: Head

    def build(self) -> nn.Sequential:
        """Return the model, initialized by torch's global generator."""

    def read(self, device: torch.device | None, seed: int, microbatches: int) -> Data:
        """Read the data; all ranks must call it."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a microbatch, in nats."""

    def accuracy(self, model: nn.Module, held_out: Batch) -> float | None:
        """Return the held-out accuracy; None if it is not meaningful."""
