"""Who takes part in compare_subnets.py: a task, a method, an optimizer and its rate."""

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
    halved,
)
from benchmarks.subnets.tasks import Bytes, Digits, Task
from pyparallel.subnets import Averaged


@dataclass(frozen=True)
class SGD:
    """With Nesterov's momentum."""

    lr: float
    momentum: float = 0.9

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Over these."""
        return torch.optim.SGD(
            parameters, self.lr, momentum=self.momentum, nesterov=self.momentum > 0
        )


@dataclass(frozen=True)
class AdamW:
    """With torch's defaults but the rate."""

    lr: float

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Over these."""
        return torch.optim.AdamW(parameters, self.lr)


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    task: Task
    method: Method
    make_optimizer: MakeOptimizer

    @property
    def options(self) -> str:
        """All that was chosen."""
        return f"{self.method!r}, {self.make_optimizer!r}"


INTERVAL = 20
# Rates are the best of seed 0, of 0.03, 0.1 and 0.3 and of 0.003 and 0.01. On digits all three
# suit SubnetTrainer alike, and of LocalSGD's two the smaller is no better: both have DDP's.
DIGITS = (
    Entry(Digits(), DataParallel(), SGD(0.1)),
    Entry(Digits(), halved(), SGD(0.1)),
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
