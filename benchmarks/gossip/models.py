"""Models of the benchmark: matrix products, or sleeps in place of compute.

With four ranks on two cores, copying to sockets competes with compute, so real compute shows this
machine's contention. Sleeping ranks show what separate machines would, except for gloo's copies,
which still take this machine's time.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Compute:
    """Square layers."""

    layers: int
    width: int

    @property
    def numel(self) -> int:
        return self.layers * self.width**2


@dataclass(frozen=True)
class RealCompute(Compute):
    """A multilayer perceptron."""

    batch: int
    name: str = "real, 1 thread a rank"

    def build(self) -> nn.Module:
        return nn.Sequential(*[Block(self.width) for _ in range(self.layers)])

    def make_inputs(self) -> Tensor:
        return torch.randn(self.batch, self.width)


@dataclass(frozen=True)
class SleepingCompute(Compute):
    """Layers that sleep instead of computing, a third of the time in forward."""

    seconds: float  # of forward and backward together

    @property
    def name(self) -> str:
        return f"sleep {self.seconds * 1e3:.0f} ms"

    def build(self) -> nn.Module:
        """Return layers whose gradients are zero."""
        share = self.seconds / self.layers
        return nn.Sequential(*[SleepingBlock(self.width, share) for _ in range(self.layers)])

    def make_inputs(self) -> Tensor:
        """Return a batch, whose values are not used."""
        return torch.zeros(1)


class Block(nn.Module):
    """A linear layer without bias, and a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(inputs @ self.weight)


class SleepingBlock(Block):
    """A parameter of the same shape, whose gradient takes a given time."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width)
        self.seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        return _Sleep.apply(inputs, self.weight, self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        time.sleep(2 * ctx.seconds / 3)
        return gradient, torch.zeros_like(weight), None
