"""Heads to choose from: linear, pooled, convolutional, and tied to the model's embedding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ...training.arguments import check_integer, is_integer, require
from ..messages import Value
from .heads import Head


@dataclass(frozen=True)
class LinearHead(Head):
    """A linear layer on the last dimension: (batch, ..., width) to (batch, ..., num_outputs).

    Each token of (batch, length, width) gets its own outputs.

    Args:
        num_outputs: classes, or numbers to predict.
        norm: a class such as ``nn.LayerNorm``, called with the width, for a norm before the linear
            layer. None: no norm.
    """

    num_outputs: int
    norm: type[nn.Module] | None = None

    def __post_init__(self) -> None:
        check_integer("num_outputs", self.num_outputs)
        _check_norm(self.norm)

    def __repr__(self) -> str:
        return f"LinearHead(num_outputs={self.num_outputs}, norm={_name_of(self.norm)})"

    @override
    def build(self, example: Value) -> nn.Module:
        fits = isinstance(example, Tensor) and example.dim() > 1
        checked = self._check(example, "of shape (batch, ..., width)", fits=fits)
        width = checked.shape[-1]
        module: nn.Module = nn.Linear(width, self.num_outputs)
        if self.norm is not None:
            module = nn.Sequential(self.norm(width), module)
        return module.to(checked.device, checked.dtype)


@dataclass(frozen=True)
class PooledHead(Head):
    """A linear layer on the mean over all dimensions but the batch and the features.

    Args:
        num_outputs: classes, or numbers to predict.
        dim: the dimension of the features: 1 for (batch, channels, ...), -1 for (batch, ...,
            width). None: 1, but an error for three dimensions, which may be either.
    """

    num_outputs: int
    dim: int | None = None

    def __post_init__(self) -> None:
        check_integer("num_outputs", self.num_outputs)
        rule = "dim must be 1, -1 or None"
        got = f"{self.dim!r}: 1 for (batch, channels, ...), -1 for (batch, ..., width)"
        require(self.dim in (None, 1, -1) and not isinstance(self.dim, bool), rule, got)

    @override
    def build(self, example: Value) -> nn.Module:
        fits = isinstance(example, Tensor) and example.dim() > 1
        checked = self._check(example, "of two dimensions or more", fits=fits)
        rule = "dim must be given for a PooledHead on three dimensions"
        got = f"None for shape {list(checked.shape)}"
        fix = "dim=1 if it is (batch, channels, length), dim=-1 if it is (batch, length, width)"
        require(self.dim is not None or checked.dim() != 3, rule, f"{got}: {fix}")
        dim = 1 if self.dim is None else self.dim
        linear = nn.Linear(checked.shape[dim], self.num_outputs)
        pooled = tuple(range(2, checked.dim()) if dim == 1 else range(1, checked.dim() - 1))
        module = nn.Sequential(GlobalMean(pooled), linear) if pooled else linear
        return module.to(checked.device, checked.dtype)


class GlobalMean(nn.Module):
    """The mean over the given dimensions."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, value: Tensor) -> Tensor:
        """Return the mean, of the shape without those dimensions."""
        return value.mean(self.dims)

    @override
    def extra_repr(self) -> str:
        return f"dims={self.dims}"


@dataclass(frozen=True)
class ConvHead(Head):
    """A head of 3 x 3 convolutions with batch normalization and ReLU, global mean, linear layer.

    The default is ``conv128_bn_conv64_bn_gbpl_fc`` in the notation of the authors' code for
    arXiv 2010.04116. Maps (batch, channels, height, width) to (batch, num_outputs). The
    convolutions keep the image size and have no bias, as the normalization has one.

    Args:
        num_outputs: classes, or numbers to predict.
        channels: output channels of each convolution, at least one.
    """

    num_outputs: int
    channels: tuple[int, ...] = (128, 64)

    def __post_init__(self) -> None:
        check_integer("num_outputs", self.num_outputs)
        channels = self.channels
        fits = isinstance(channels, tuple) and channels and all(map(is_integer, channels))
        rule = "channels must be a tuple of positive integers, one for each convolution"
        require(fits, rule, repr(channels))

    @override
    def build(self, example: Value) -> nn.Module:
        fits = isinstance(example, Tensor) and example.dim() == 4
        checked = self._check(example, "of shape (batch, channels, height, width)", fits=fits)
        layers: list[nn.Module] = []
        for before, after in pairwise((checked.shape[1], *self.channels)):
            conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
        linear = nn.Linear(self.channels[-1], self.num_outputs)
        return nn.Sequential(*layers, GlobalMean((2, 3)), linear).to(checked.device, checked.dtype)


@dataclass(frozen=True)
class TiedHead(Head):
    """A head of ``norm(h) @ E.T``, with E the model's embedding weight: (vocabulary, width).

    Maps (batch, ..., width) to (batch, ..., vocabulary). The head does not train E, which belongs
    to the embedding's stage: its module is called as ``module(h, E)``, with E received from that
    stage, and only the norm learns from the head's loss.

    Args:
        embedding: of the model itself, not a copy.
        norm: a class such as ``nn.RMSNorm``, called with the width. None: no norm; then the head
            has no parameters.
    """

    embedding: nn.Embedding
    norm: type[nn.Module] | None = nn.LayerNorm

    def __post_init__(self) -> None:
        weight = getattr(self.embedding, "weight", None)
        fits = isinstance(self.embedding, nn.Embedding) and isinstance(weight, nn.Parameter)
        rule = "embedding must be the model's nn.Embedding, with a parameter as its weight"
        require(fits, rule, f"{type(self.embedding).__name__} with {type(weight).__name__}")
        _check_norm(self.norm)

    def __repr__(self) -> str:
        return f"TiedHead(embedding={self.embedding!r}, norm={_name_of(self.norm)})"

    @property
    @override
    def shared(self) -> nn.Parameter:
        assert isinstance(self.embedding.weight, nn.Parameter)
        return self.embedding.weight

    @override
    def build(self, example: Value) -> nn.Module:
        # Only the width is read: on other ranks than the embedding's the weight is a stale copy.
        width = self.embedding.embedding_dim
        fits = isinstance(example, Tensor) and example.dim() > 1 and example.shape[-1] == width
        checked = self._check(example, f"of shape (batch, ..., {width})", fits=fits)
        norm = nn.Identity() if self.norm is None else self.norm(width)
        return _Tied(norm).to(checked.device, checked.dtype)


class _Tied(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, value: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(self.norm(value), weight.detach().to(value.dtype))


def _check_norm(norm: object) -> None:
    fits = norm is None or (isinstance(norm, type) and issubclass(norm, nn.Module))
    require(fits, "norm must be a class of modules such as nn.LayerNorm, or None", repr(norm))


def _name_of(norm: type[nn.Module] | None) -> str:
    return "None" if norm is None else norm.__name__
