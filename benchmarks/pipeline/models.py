"""The models of the benchmarks: a byte transformer, and layers that sleep.

Two cores can run two computing stages; deeper pipelines are measured with sleeping stages, which do
not contend for cores, so that only the schedule and the runtime's overhead are measured.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from pyparallel.pipeline import Costs

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Model(Protocol):
    """Protocol of a sequence of layers that can be split into stages of equal cost."""

    @property
    def loss(self) -> LossFunction:
        """Return the loss function, a mean over the microbatch."""

    def build(self) -> list[nn.Module]:
        """Return new layers, the same on all ranks."""

    def split(self, num_stages: int) -> list[int]:
        """Return the first layer of stages 1, 2, ..."""

    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one step."""


def build_stages(model: Model, num_stages: int) -> list[nn.Sequential]:
    """Return the stages of a new model."""
    layers = model.build()
    edges = pairwise([0, *model.split(num_stages), len(layers)])
    return [nn.Sequential(*layers[begin:end]) for begin, end in edges]


@dataclass(frozen=True)
class ByteModel(Model):
    """A decoder-only byte transformer; its last block is narrower by the cost of the head.

    Args:
        width: of the residual stream; the hidden layers of blocks are four times as wide.
        num_blocks: a multiple of every number of stages.
        microbatch: samples per microbatch.
        length: bytes per sample.
    """

    width: int
    num_blocks: int
    num_heads: int
    microbatch: int
    length: int

    @property
    @override
    def loss(self) -> LossFunction:
        return byte_loss

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return f"byte transformer, {self.num_blocks} blocks of width {self.width}, 1 thread a rank"

    @property
    def tokens(self) -> int:
        """Return the bytes per microbatch."""
        return self.microbatch * self.length

    @override
    def build(self) -> list[nn.Module]:
        torch.manual_seed(0)
        hidden = 4 * self.width
        widths = [hidden] * (self.num_blocks - 1) + [hidden - NUM_BYTES // 2]
        blocks = [Block(self.width, each, self.num_heads) for each in widths]
        head = nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, NUM_BYTES))
        return [Embedding(self.width, self.length), *blocks, head]

    @override
    def split(self, num_stages: int) -> list[int]:
        """Split into equally many blocks; the first stage has the embedding, the last the head."""
        return [1 + self.num_blocks * stage // num_stages for stage in range(1, num_stages)]

    @override
    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Return random bytes and the bytes after them: (samples, length) int64 each."""
        generator = torch.Generator().manual_seed(0)
        shape = (num_microbatches * self.microbatch, self.length + 1)
        text = torch.randint(NUM_BYTES, shape, generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


NUM_BYTES = 256
# Shared by all benchmarks of two stages on two cores, so that their rows are comparable.
FOR_TWO_CORES = ByteModel(width=192, num_blocks=4, num_heads=4, microbatch=1, length=512)


@dataclass(frozen=True)
class EncoderModel(Model):
    """Stages of ``nn.TransformerEncoderLayer``, with an embedding before and a head after them.

    Args:
        width: of the layers, whose hidden layers are twice as wide.
        num_layers: a multiple of every number of stages.
        microbatch: samples per microbatch.
        length: tokens per sample.
    """

    width: int
    num_layers: int
    num_heads: int
    microbatch: int
    length: int

    @property
    @override
    def loss(self) -> LossFunction:
        return byte_loss

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return (
            f"{self.num_layers} encoder layers of width {self.width}, {self.tokens} tokens a "
            "microbatch, 1 thread a rank"
        )

    @property
    def tokens(self) -> int:
        """Return the tokens per microbatch."""
        return self.microbatch * self.length

    @override
    def build(self) -> list[nn.Module]:
        torch.manual_seed(0)
        layers = [
            nn.TransformerEncoderLayer(self.width, self.num_heads, 2 * self.width, batch_first=True)
            for _ in range(self.num_layers)
        ]
        return [nn.Embedding(NUM_BYTES, self.width), *layers, nn.Linear(self.width, NUM_BYTES)]

    @override
    def split(self, num_stages: int) -> list[int]:
        """Split into equally many layers; the first stage has the embedding, the last the head."""
        return [1 + self.num_layers * stage // num_stages for stage in range(1, num_stages)]

    @override
    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Return random tokens and targets: (samples, length) int64 each."""
        generator = torch.Generator().manual_seed(0)
        shape = (2, num_microbatches * self.microbatch, self.length)
        inputs, target = torch.randint(NUM_BYTES, shape, generator=generator)
        return inputs, target


SMALL_MICROBATCHES = EncoderModel(width=128, num_layers=6, num_heads=4, microbatch=8, length=32)


def byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy in nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Embedding(nn.Module):
    """An embedding of bytes and positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Parameter(torch.randn(length, width))

    def forward(self, text: Tensor) -> Tensor:
        """Embed (batch, length) int64 as (batch, length, width)."""
        return self.bytes(text) + self.positions


class Block(nn.Module):
    """A pre-norm transformer block: causal attention and an MLP."""

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
        """Apply the block to (batch, length, width)."""
        stream = stream + self.attend(self.before_attention(stream))
        return stream + self.perceptron(self.before_perceptron(stream))

    def attend(self, stream: Tensor) -> Tensor:
        """Apply the attention to (batch, length, width)."""
        parts = self.attention_in(stream).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class SleepingModel(Model):
    """Layers that sleep; half of a backward is for the input, half for the weights.

    Args:
        num_layers: a multiple of every number of stages.
        forward: seconds that all layers together sleep in the forward of a microbatch.
        backward: the same for the backward.
    """

    num_layers: int
    forward: float
    backward: float

    @property
    @override
    def loss(self) -> LossFunction:
        return mean_of_output

    @override
    def build(self) -> list[nn.Module]:
        """Return equal layers, after one whose output requires a gradient."""
        torch.manual_seed(0)
        share = 1 / self.num_layers
        layers = [
            SleepingLayer(self.forward * share, self.backward * share)
            for _ in range(self.num_layers)
        ]
        return [Scale(), *layers]

    @override
    def split(self, num_stages: int) -> list[int]:
        return [1 + self.num_layers * stage // num_stages for stage in range(1, num_stages)]

    def costs(self, num_stages: int) -> Costs:
        """Return the durations of one of ``num_stages`` stages, in seconds."""
        forward, backward = self.forward / num_stages, self.backward / num_stages
        return Costs(forward, backward, backward / 2, backward / 2)

    @override
    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Return one sample per microbatch, of any value."""
        return torch.ones(num_microbatches, 1), torch.zeros(num_microbatches, 1)


def mean_of_output(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over a microbatch."""
    return (output - target).mean()


class Scale(nn.Module):
    """A layer that multiplies by a learned scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scale the inputs."""
        return inputs * self.factor


class SleepingLayer(nn.Module):
    """A layer that adds a weight to its input, and sleeps in forward and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = (forward, backward / 2)
        self.clock = Clock()

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep, and add the weight."""
        forward, half_backward = self.seconds
        outputs = _Sleep.apply(inputs, self.clock, forward, half_backward)
        return outputs + _Sleep.apply(self.weight, self.clock, 0.0, half_backward)


class Clock:
    """A sleep that is exact on average: shorter after one that took too long."""

    def __init__(self) -> None:
        self._excess = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep for about ``seconds``."""
        begin = time.perf_counter()
        time.sleep(max(0.0, seconds - self._excess))
        self._excess += time.perf_counter() - begin - seconds


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward
        clock.sleep(forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.sleep(ctx.seconds)
        return gradient, None, None, None
