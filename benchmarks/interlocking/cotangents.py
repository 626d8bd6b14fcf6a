"""Gradients of several losses, propagated through a stage together or one after the other."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from benchmarks.pipeline.models import Block
from pyparallel.pipeline.interlocking.stage import InterlockingStage
from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter
from pyparallel.pipeline.runtime.stage_weights import LiveWeights

TOGETHER, APART = "together", "one after the other"
WARM_UP = 3


@dataclass(frozen=True)
class MLP:
    """Two linear layers with a ReLU between them."""

    width: int
    samples: int

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return f"MLP, width {self.width}, {self.samples} samples"

    def build(self) -> nn.Module:
        """Return the layers."""
        return nn.Sequential(
            nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, self.width)
        )

    def make_input(self) -> Tensor:
        """Return a random (samples, width) input."""
        return torch.randn(self.samples, self.width)


@dataclass(frozen=True)
class OneBlock:
    """A transformer block."""

    width: int
    samples: int
    length: int

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return f"transformer block, width {self.width}, {self.samples} x {self.length} tokens"

    def build(self) -> nn.Module:
        """Return the block."""
        return Block(self.width, 4 * self.width, num_heads=4)

    def make_input(self) -> Tensor:
        """Return a random (samples, length, width) input."""
        return torch.randn(self.samples, self.length, self.width)


Compute = MLP | OneBlock


def measure(
    rank: int, computes: Sequence[Compute], counts: Sequence[int], turns: int
) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Return seconds of both ways in turns, by module and number of gradients."""
    return {
        (compute.name, count): take_turns(compute, count, turns)
        for compute in computes
        for count in counts
    }


def take_turns(compute: Compute, count: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of ``count`` gradients in each turn."""
    stage = InterlockingStage(0, compute.build(), [], LiveWeights(None), None, None)
    inputs = compute.make_input().requires_grad_()
    output = stage.forward(0, inputs, MicrobatchSplitter(None, None, 0, 1))
    assert isinstance(output, Tensor)
    gradients = [(torch.randn_like(output),) for _ in range(count)]
    at_once = {TOGETHER: count, APART: 1}
    seconds: dict[str, list[float]] = {name: [] for name in at_once}
    order = random.Random(0)
    for turn in range(turns + WARM_UP):
        for name in order.sample(list(at_once), len(at_once)):
            begin = time.perf_counter()
            input_vjp(stage, gradients, at_once[name])
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def input_vjp(
    stage: InterlockingStage, gradients: Sequence[tuple[Tensor]], at_once: int
) -> list[tuple[Tensor, ...]]:
    """Return the gradient of the stage's input for each gradient of its output."""
    parts = (gradients[begin : begin + at_once] for begin in range(0, len(gradients), at_once))
    return list(chain.from_iterable(stage.input_vjp(0, part) for part in parts))
