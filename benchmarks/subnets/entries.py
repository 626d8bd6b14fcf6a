"""The entries of compare.py: a task, a method, an optimizer and its learning rate."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.subnets.methods import DDP, DDP_BF16, LocalSteps, MakeOptimizer, Method, Subnets
from benchmarks.subnets.tasks import Bytes, Digits, Task
from pyparallel.subnets import Averaged


@dataclass(frozen=True)
class SGD:
    """SGD with Nesterov momentum."""

    lr: float
    momentum: float = 0.9

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(
            parameters, self.lr, momentum=self.momentum, nesterov=self.momentum > 0
        )


@dataclass(frozen=True)
class AdamW:
    """AdamW with torch's defaults except the learning rate."""

    lr: float

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, self.lr)


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    task: Task
    method: Method
    make_optimizer: MakeOptimizer

    @property
    def options(self) -> str:
        return f"{self.method!r}, {self.make_optimizer!r}"


INTERVAL = 20
# Learning rates are the best for seed 0, out of 0.03, 0.1 and 0.3 and of 0.003 and 0.01. On digits
# all three are equally good for SubnetTrainer, and for LocalSGD the smaller is no better: both use
# DDP's.
DIGITS = tuple(
    Entry(Digits(), method, SGD(0.1))
    for method in (
        DDP,
        DDP_BF16,
        LocalSteps(INTERVAL, name="LocalSGD"),
        Subnets(INTERVAL, name="SubnetTrainer"),
    )
)
BYTES = tuple(
    Entry(Bytes(), method, AdamW(3e-3))
    for method in (
        DDP,
        Subnets(INTERVAL, name="SubnetTrainer"),
        Subnets(INTERVAL, Averaged(), name="SubnetTrainer, averaged"),
    )
)
