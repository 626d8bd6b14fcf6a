"""Gradients of several losses, propagated through a stage together or one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from benchmarks.harness.turns import take_turns, timed
from benchmarks.pipeline.models import Block
from pyparallel.pipeline.interlocking.stage import InterlockingStage
from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter
from pyparallel.pipeline.runtime.stage_weights import LiveWeights

TOGETHER, APART = "together", "one after the other"


@dataclass(frozen=True)
class Compute:
    """A transformer block on samples of some length; without a length, two layers of an MLP."""

    width: int
    samples: int
    length: int | None = None

    @property
    def name(self) -> str:
        if self.length is None:
            return f"MLP, width {self.width}, {self.samples} samples"
        return f"transformer block, width {self.width}, {self.samples} x {self.length} tokens"

    def build(self) -> nn.Module:
        width = self.width
        if self.length is None:
            return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        return Block(width, 4 * width, num_heads=4)

    def make_input(self) -> Tensor:
        length = () if self.length is None else (self.length,)
        return torch.randn(self.samples, *length, self.width)


def measure(
    rank: int, computes: Sequence[Compute], counts: Sequence[int], turns: int
) -> dict[tuple[str, int], dict[str, list[float]]]:
    return {
        (compute.name, count): measure_one(compute, count, turns)
        for compute in computes
        for count in counts
    }


def measure_one(compute: Compute, count: int, turns: int) -> dict[str, list[float]]:
    module = compute.build()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    stage = InterlockingStage(0, module, optimizers, LiveWeights(None), None, None)
    inputs = compute.make_input().requires_grad_()
    output = stage.forward(0, inputs, MicrobatchSplitter(None, None, 0, 1))
    gradients = [(torch.randn_like(output),) for _ in range(count)]
    at_once = {TOGETHER: count, APART: 1}
    runs = {n: partial(timed, input_vjp, stage, gradients, each) for n, each in at_once.items()}
    return take_turns(runs, turns)


def input_vjp(
    stage: InterlockingStage, gradients: Sequence[tuple[Tensor]], at_once: int
) -> list[tuple[Tensor, ...]]:
    """Return the gradient of the stage's input for each gradient of its output."""
    parts = (gradients[begin : begin + at_once] for begin in range(0, len(gradients), at_once))
    return list(chain.from_iterable(stage.input_vjp(0, part) for part in parts))
