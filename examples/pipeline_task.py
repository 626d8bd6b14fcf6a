"""What train_pipeline.py can train: a model in layers, and data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pyparallel.pipeline import Head

Batch = tuple[Tensor, Tensor]  # inputs and target


@dataclass(frozen=True)
class Data:
    """The same on every rank.

    Args:
        batches: to train on, without end.
        held_out: what is never trained on.
        size: for the table.
    """

    batches: Iterator[Batch]
    held_out: Batch
    size: str


class Task(Protocol):
    """Something to learn.

    Args:
        num_layers: of the model; no more stages can be made of it.
        layers: what they are.
        loss_unit: in which losses are shown.
        per_nat: how many of those a nat has.
        item: what a step has many of.
        batch_size: samples of a step.
        step_items: how many items that makes.
        rates: the learning rate of each optimizer.
        head: of every stage but the last, where these need one.
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
        """The model, from torch's global generator."""

    def read(self, device: torch.device | None, seed: int, microbatches: int) -> Data:
        """The data; all ranks must call it."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over a microbatch, in nats."""

    def accuracy(self, model: nn.Module, held_out: Batch) -> float | None:
        """The part of what is held out that is read right; None where it says little."""
