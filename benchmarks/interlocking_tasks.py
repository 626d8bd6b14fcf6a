"""What compare_interlocking.py trains: models deep enough that it matters who learns from whom."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.pipeline_tasks import Bytes, Digits, Task
from examples.byte_transformer import Block, Letters
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
class DeepBytes(Bytes):
    """The text, read by eight blocks, two on each stage; initialized as deep transformers are.

    As the examples begin it, with small embeddings, gradients hardly get through so many blocks at
    first, and end-to-end training is judged by its beginning.
    """

    updates: int = 600
    context: int = 64
    width: int = 48
    num_layers: int = 8
    num_heads: int = 4
    num_held_out: int = 512
    split: tuple[int, ...] = (3, 5, 7)

    @torch.no_grad()
    def build(self) -> nn.Sequential:
        """Embeddings as torch makes them; what blocks add to the stream is small (as in GPT-2)."""
        model = super().build()
        letters, *blocks, _ = model
        assert isinstance(letters, Letters)
        nn.init.normal_(letters.bytes.weight)
        nn.init.normal_(letters.places.weight, std=0.1)
        for block in blocks:
            assert isinstance(block, Block)
            for layer in (block.project, block.mlp[-1]):
                layer.weight.mul_((2 * self.num_layers) ** -0.5)
                layer.bias.zero_()
        return model


@dataclass(frozen=True)
class Trial:
    """A task in four stages, and what gives the first three a loss of their own."""

    task: Task
    head: Head


TRIALS = (
    Trial(
        DeepDigits(
            "digits", partial(torch.optim.Adam, fused=True), rates=(1e-3, 3e-3, 1e-2),
            main_rate=3e-3, sweep_seed=0, split=(4, 8, 12),
        ),
        PooledHead(10),
    ),
    Trial(
        DeepBytes(
            "bytes", partial(torch.optim.Adam, fused=True), rates=(3e-3, 6e-3, 1.2e-2),
            main_rate=6e-3,
        ),
        LinearHead(256, nn.LayerNorm),
    ),
)  # fmt: skip
