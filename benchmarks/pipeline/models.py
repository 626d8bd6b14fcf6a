"""What the stages compute: a byte model, or sleep for as long as a stage would take elsewhere.

Two cores carry two stages that compute; deeper pipelines are measured with stages that sleep, which
do not contend for cores, so that only the order in which they work shows, and what the runtime
adds to it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pyparallel.pipeline import Costs

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Model(Protocol):
    """Layers in a row that can be cut into stages of equal work."""

    @property
    def loss(self) -> LossFunction:
        """The mean over a microbatch."""

    def build(self) -> list[nn.Module]:
        """New layers, the same on every rank."""

    def split(self, num_stages: int) -> list[int]:
        """The layers at which the stages after the first begin."""

    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one call."""


def cut(model: Model, num_stages: int) -> list[nn.Sequential]:
    """The stages of a new model."""
    layers = model.build()
    edges = pairwise([0, *model.split(num_stages), len(layers)])
    return [nn.Sequential(*layers[begin:end]) for begin, end in edges]


@dataclass(frozen=True)
class ByteModel:
    """A decoder-only transformer over bytes; its last block is narrower by what the head costs.

    Args:
        width: of the residual stream; the blocks' hidden layers have four times as many.
        num_blocks: a multiple of every number of stages.
        microbatch: samples.
        length: bytes of a sample.
    """

    width: int
    num_blocks: int
    num_heads: int
    microbatch: int
    length: int

    @property
    def loss(self) -> LossFunction:
        """Nats per byte."""
        return byte_loss

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return f"byte transformer, {self.num_blocks} blocks of width {self.width}, 1 thread a rank"

    @property
    def tokens(self) -> int:
        """Bytes of a microbatch."""
        return self.microbatch * self.length

    def build(self) -> list[nn.Module]:
        """Embedding, blocks, head."""
        torch.manual_seed(0)
        hidden = 4 * self.width
        widths = [hidden] * (self.num_blocks - 1) + [hidden - NUM_BYTES // 2]
        blocks = [Block(self.width, each, self.num_heads) for each in widths]
        head = nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, NUM_BYTES))
        return [Embedding(self.width, self.length), *blocks, head]

    def split(self, num_stages: int) -> list[int]:
        """As many blocks in each; the embedding goes with the first, the head with the last."""
        return [1 + self.num_blocks * stage // num_stages for stage in range(1, num_stages)]

    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """(microbatches * microbatch, length) int64 each: any bytes, and those that follow them."""
        generator = torch.Generator().manual_seed(0)
        shape = (num_microbatches * self.microbatch, self.length + 1)
        text = torch.randint(NUM_BYTES, shape, generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


NUM_BYTES = 256
# Of programs that measure two stages, a core for each: so their rows can be set side by side.
FOR_TWO_CORES = ByteModel(width=192, num_blocks=4, num_heads=4, microbatch=1, length=512)


def byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Embedding(nn.Module):
    """Bytes and their places."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.places = nn.Parameter(torch.randn(length, width))

    def forward(self, text: Tensor) -> Tensor:
        """(batch, length) to (batch, length, width)."""
        return self.bytes(text) + self.places


class Block(nn.Module):
    """Causal attention and a multilayer perceptron, each on what a LayerNorm gives."""

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
        """(batch, length, width) to the same."""
        stream = stream + self.attend(self.before_attention(stream))
        return stream + self.perceptron(self.before_perceptron(stream))

    def attend(self, stream: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        parts = self.attention_in(stream).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class SleepingModel:
    """Layers that sleep: half of a backward is for the input, half for the weights.

    Args:
        num_layers: a multiple of every number of stages.
        forward: seconds that all layers together sleep in the forward of a microbatch.
        backward: and in its backward.
    """

    num_layers: int
    forward: float
    backward: float

    @property
    def loss(self) -> LossFunction:
        """Any number that has a gradient."""
        return mean_of_output

    def build(self) -> list[nn.Module]:
        """Equal layers, after one that gives the first of them an input with a gradient."""
        torch.manual_seed(0)
        share = 1 / self.num_layers
        layers = [
            SleepingLayer(self.forward * share, self.backward * share)
            for _ in range(self.num_layers)
        ]
        return [Scale(), *layers]

    def split(self, num_stages: int) -> list[int]:
        """As many layers in each."""
        return [1 + self.num_layers * stage // num_stages for stage in range(1, num_stages)]

    def costs(self, num_stages: int) -> Costs:
        """Seconds of each pass in one of so many stages."""
        forward, backward = self.forward / num_stages, self.backward / num_stages
        return Costs(forward, backward, backward / 2, backward / 2)

    def make_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """One sample a microbatch, of which only the existence counts."""
        return torch.ones(num_microbatches, 1), torch.zeros(num_microbatches, 1)


def mean_of_output(output: Tensor, target: Tensor) -> Tensor:
    """The mean over a microbatch."""
    return (output - target).mean()


class Scale(nn.Module):
    """Times a number that can be learned."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs, scaled."""
        return inputs * self.factor


class SleepingLayer(nn.Module):
    """Adds a weight to its input, and takes its time in all three passes."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = (forward, backward / 2)
        self.clock = Clock()

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep, and hand the inputs on."""
        forward, half_backward = self.seconds
        handed_on = _Sleep.apply(inputs, self.clock, forward, half_backward)
        return handed_on + _Sleep.apply(self.weight, self.clock, 0.0, half_backward)


class Clock:
    """Sleeps as long as it should on the average: less after a sleep that took too long."""

    def __init__(self) -> None:
        self._late = 0.0

    def sleep(self, seconds: float) -> None:
        """Take that much time, or a little more."""
        begin = time.perf_counter()
        time.sleep(max(0.0, seconds - self._late))
        self._late += time.perf_counter() - begin - seconds


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
