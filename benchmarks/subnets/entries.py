"""The entries of compare.py: a task, a method, an optimizer and its learning rate."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.subnets.methods import (
    DataParallel,
    LocalSteps,
    MakeOptimizer,
    Method,
    Subnets,
    ddp_bf16,
)
from benchmarks.subnets.tasks import Bytes, Digits, Task
from pyparallel.subnets import Averaged


@dataclass(frozen=True)
class SGD:
    """SGD with Nesterov momentum."""

    lr: float
    momentum: float = 0.9

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer over these parameters."""
        return torch.optim.SGD(
            parameters, self.lr, momentum=self.momentum, nesterov=self.momentum > 0
        )


@dataclass(frozen=True)
class AdamW:
    """AdamW with torch's defaults except the learning rate."""

    lr: float

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer over these parameters."""
        return torch.optim.AdamW(parameters, self.lr)


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    task: Task
    method: Method
    make_optimizer: MakeOptimizer

    @property
    def options(self) -> str:
        """Complete description of the method and optimizer."""
        return f"{self.method!r}, {self.make_optimizer!r}"


INTERVAL = 20
# Learning rates are the best for seed 0, out of 0.03, 0.1 and 0.3 and of 0.003 and 0.01. On digits
# all three are equally good for SubnetTrainer, and for LocalSGD the smaller is no better: both use
# DDP's.
DIGITS = (
    Entry(Digits(), DataParallel(), SGD(0.1)),
    Entry(Digits(), ddp_bf16(), SGD(0.1)),
    Entry(Digits(), LocalSteps(INTERVAL), SGD(0.1)),
    Entry(Digits(), Subnets(INTERVAL), SGD(0.1)),
)
BYTES = (
    Entry(Bytes(), DataParallel(), AdamW(3e-3)),
    Entry(Bytes(), Subnets(INTERVAL), AdamW(3e-3)),
    Entry(
        Bytes(),
        Subnets(INTERVAL, Averaged(), name="SubnetTrainer, averaged"),
        AdamW(3e-3),
    ),
)
