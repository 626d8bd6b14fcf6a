"""What compare_interlocking.py trains: models deep enough that it matters who learns from whom."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.pipeline_tasks import Bytes, Digits, Task
from pyparallel.pipeline import Head, LinearHead, PooledHead

NUM_STAGES = 4


@dataclass(frozen=True)
class DeepDigits(Digits):
    """The digits, read by eight layers that learn, two on each stage."""

    width: int = 16

    def build(self) -> nn.Sequential:
        """Six convolutions, then two linear layers."""
        once, twice = self.width, 2 * self.width
        return nn.Sequential(
            *convolution(1, once), *convolution(once, once),
            *convolution(once, twice, stride=2), *convolution(twice, twice),
            *convolution(twice, twice), *convolution(twice, twice),
            nn.Flatten(), nn.Linear(16 * twice, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def convolution(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    """3 x 3, and what makes it nonlinear."""
    return [nn.Conv2d(before, after, 3, padding=1, stride=stride), nn.ReLU()]


@dataclass(frozen=True)
class Trial:
    """A task in four stages, and what gives the first three a loss of their own."""

    task: Task
    head: Head


TRIALS = (
    Trial(
        DeepDigits(
            "digits", torch.optim.Adam, rates=(1e-3, 3e-3, 1e-2), main_rate=3e-3, sweep_seed=0,
            split=(4, 8, 12),
        ),
        PooledHead(10),
    ),
    Trial(
        Bytes(
            "bytes", partial(torch.optim.Adam, fused=True), rates=(1e-3, 3e-3, 1e-2),
            main_rate=3e-3, updates=800, context=64, width=64, num_layers=8, num_heads=4,
            split=(3, 5, 7),
        ),
        LinearHead(256, nn.LayerNorm),
    ),
)  # fmt: skip
