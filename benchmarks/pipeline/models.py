"""The models of the benchmarks: byte transformers, and layers that sleep.

Two cores can run two computing stages; deeper pipelines are measured with sleeping stages, which do
not contend for cores, so that only the schedule and the runtime's overhead are measured.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from examples.models import byte_loss
from pyparallel.planning.pipelines import Costs

LossFunction = Callable[[Tensor, Tensor], Tensor]
NUM_BYTES = 256


class Model:
    """A sequence of layers, all but the first and maybe the last of equal cost.

    ``build()`` returns new layers, the same on all ranks, ``make_batch(num_microbatches)`` the
    inputs and targets of one step.
    """

    num_equal: int  # a multiple of every number of stages
    loss: LossFunction  # a mean over the microbatch

    def split(self, num_stages: int) -> list[int]:
        """Return the first layer of stages 1, 2, ...: equally many layers after the first one."""
        return [1 + self.num_equal * stage // num_stages for stage in range(1, num_stages)]


def build_stages(model: Model, num_stages: int) -> list[nn.Sequential]:
    layers = model.build()
    edges = pairwise([0, *model.split(num_stages), len(layers)])
    return [nn.Sequential(*layers[begin:end]) for begin, end in edges]


@dataclass(frozen=True)
class TextModel(Model):
    """Blocks after an embedding and before a head."""

    width: int  # of the residual stream
    num_blocks: int  # a multiple of every number of stages
    num_heads: int
    microbatch: int  # samples per microbatch
    length: int  # tokens per sample

    loss = staticmethod(byte_loss)

    @property
    def num_equal(self) -> int:
        return self.num_blocks

    @property
    def tokens(self) -> int:
        return self.microbatch * self.length


@dataclass(frozen=True)
class ByteModel(TextModel):
    """A decoder-only byte transformer; its last block is narrower by the cost of the head.

    The hidden layers of blocks are four times as wide as the residual stream.
    """

    @property
    def name(self) -> str:
        return f"byte transformer, {self.num_blocks} blocks of width {self.width}, 1 thread a rank"

    def build(self) -> list[nn.Module]:
        torch.manual_seed(0)
        hidden = 4 * self.width
        widths = [hidden] * (self.num_blocks - 1) + [hidden - NUM_BYTES // 2]
        blocks = [Block(self.width, each, self.num_heads) for each in widths]
        head = nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, NUM_BYTES))
        return [Embedding(self.width, self.length), *blocks, head]

    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Return random bytes and the bytes after them: (samples, length) int64 each."""
        generator = torch.Generator().manual_seed(0)
        shape = (num_microbatches * self.microbatch, self.length + 1)
        text = torch.randint(NUM_BYTES, shape, generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass(frozen=True)
class EncoderModel(TextModel):
    """Stages of ``nn.TransformerEncoderLayer``, whose hidden layers are twice as wide."""

    @property
    def name(self) -> str:
        return (
            f"{self.num_blocks} encoder layers of width {self.width}, {self.tokens} tokens a "
            "microbatch, 1 thread a rank"
        )

    def build(self) -> list[nn.Module]:
        torch.manual_seed(0)
        layers = [
            nn.TransformerEncoderLayer(self.width, self.num_heads, 2 * self.width, batch_first=True)
            for _ in range(self.num_blocks)
        ]
        return [nn.Embedding(NUM_BYTES, self.width), *layers, nn.Linear(self.width, NUM_BYTES)]

    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Return random tokens and targets: (samples, length) int64 each."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, num_microbatches * self.microbatch, self.length)
        inputs, target = torch.randint(NUM_BYTES, shape, generator=generator)
        return inputs, target


# Shared by all benchmarks of two stages on two cores, so that their rows are comparable.
FOR_TWO_CORES = ByteModel(width=192, num_blocks=4, num_heads=4, microbatch=1, length=512)
SMALL_MICROBATCHES = EncoderModel(width=128, num_blocks=6, num_heads=4, microbatch=8, length=32)


class Embedding(nn.Module):
    """An embedding of bytes and positions: (batch, length) int64 as (batch, length, width)."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Parameter(torch.randn(length, width))

    def forward(self, text: Tensor) -> Tensor:
        return self.bytes(text) + self.positions


class Block(nn.Module):
    """A pre-norm transformer block on (batch, length, width): causal attention and an MLP."""

    def __init__(self, width: int, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def forward(self, stream: Tensor) -> Tensor:
        parts = self.attention_in(self.before_attention(stream))
        query, key, value = parts.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return stream + self.perceptron(self.before_perceptron(stream))


@dataclass(frozen=True)
class SleepingModel(Model):
    """Layers that sleep; half of a backward is for the input, half for the weights."""

    num_layers: int  # a multiple of every number of stages
    forward: float  # seconds that all layers together sleep in the forward of a microbatch
    backward: float  # the same for the backward

    loss = staticmethod(lambda output, target: (output - target).mean())

    @property
    def num_equal(self) -> int:
        return self.num_layers

    def build(self) -> list[nn.Module]:
        """Return equal layers, after one whose output requires a gradient."""
        torch.manual_seed(0)
        share = 1 / self.num_layers
        layers = [
            SleepingLayer(self.forward * share, self.backward * share)
            for _ in range(self.num_layers)
        ]
        return [Scale(), *layers]

    def costs(self, num_stages: int) -> Costs:
        """Return the durations of one of ``num_stages`` stages, in seconds."""
        forward, backward = self.forward / num_stages, self.backward / num_stages
        return Costs(forward, backward, backward / 2, backward / 2)

    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        return torch.ones(num_microbatches, 1), torch.zeros(num_microbatches, 1)


class Scale(nn.Module):
    """A layer that multiplies by a learned scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


class SleepingLayer(nn.Module):
    """A layer that adds a weight to its input, and sleeps in forward and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = (forward, backward / 2)
        self.clock = Clock()

    def forward(self, inputs: Tensor) -> Tensor:
        forward, half_backward = self.seconds
        outputs = Sleep.apply(inputs, self.clock.sleep, forward, half_backward)
        return outputs + Sleep.apply(self.weight, self.clock.sleep, 0.0, half_backward)


class Clock:
    """A sleep that is exact on average: shorter after one that took too long."""

    def __init__(self) -> None:
        self._excess = 0.0

    def sleep(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(max(0.0, seconds - self._excess))
        self._excess += time.perf_counter() - begin - seconds


class Sleep(torch.autograd.Function):
    """An identity that sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, sleep: Any, forward: float, backward: float) -> Tensor:
        ctx.sleep, ctx.seconds = sleep, backward
        sleep(forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.sleep(ctx.seconds)
        return gradient, None, None, None
