"""Heads of interlocking backpropagation, which give the stages inside the model a loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ...training import summarize
from ...training.arguments import check_integer, is_integer, require
from ..messages import Value, tensors_of


class Head(ABC):
    """Builds the module that maps a stage's output to the ``output`` of ``loss_fn``.

    A head learns from its own loss alone (arXiv 2010.04116). Builders are immutable; ranks compare
    their ``repr``, so it must name all arguments.
    """

    @property
    def shared(self) -> nn.Parameter | None:
        """Return the model's weight of ``module(value, weight)``; None: called with the value."""
        return None

    @abstractmethod
    def build(self, example: Value) -> nn.Module:
        """Build a new module, initialized from torch's global CPU generator.

        ``example`` is an output of the stage, of any batch size; the module is on its device and in
        its dtype. Of a tuple, such as hidden states and a mask, the heads of this package take the
        first tensor. A head that does not fit it is a ValueError.
        """

    def _check(self, example: Tensor, shape: str, *, fits: bool) -> Tensor:
        """Return the example if it is a floating-point tensor that ``fits`` the rule ``shape``."""
        if fits and example.is_floating_point():
            return example
        raise ValueError(
            f"heads must fit the outputs of their stages: {self!r} takes a floating-point tensor "
            f"{shape}, got {summarize(example)}; split the model elsewhere, or give an nn.Module"
        )


@dataclass(frozen=True)
class GivenHead(Head):
    """A head given as a module, which maps its stage's output to the ``output`` of ``loss_fn``."""

    module: nn.Module

    @override
    def build(self, example: Value) -> nn.Module:
        return self.module


Heads = Head | nn.Module | Sequence[Head | nn.Module]


def as_heads(heads: object, num_stages: int) -> tuple[Head, ...]:
    """Return one builder for every stage but the last; a ValueError of other heads.

    A builder alone is for all stages; an ``nn.ModuleList`` is a list of heads, as other lists are.
    """
    last = num_stages - 1
    each_stage = f"for each of stages 0 to {last - 1}" if last > 1 else "for stage 0"
    each_stage = each_stage if last else "for each stage but the last, none for a single one"
    given: list[Any]
    if isinstance(heads, Head):
        given = [heads] * last
    elif isinstance(heads, Sequence | nn.ModuleList) and not isinstance(heads, str):
        given = list(heads)
    else:
        rule = f"heads must be a head, or a list of one {each_stage}"
        require(isinstance(heads, nn.Module), rule, summarize(heads))
        given = [heads]
    rule, found = f"heads must hold one head {each_stage}", len(given)
    require(found >= last, rule, f"{found}: stage {found} has none")
    place = "last" if last else "only one"
    require(found <= last, rule, f"{found}: stage {last} is the {place}, which has the loss itself")
    for stage, head in enumerate(given):
        rule = "heads must hold builders such as LinearHead(10) and modules"
        require(isinstance(head, Head | nn.Module), rule, f"{summarize(head)} for stage {stage}")
    _check_apart(given)
    return tuple(each if isinstance(each, Head) else GivenHead(each) for each in given)


def _check_apart(given: Sequence[object]) -> None:
    first: dict[int, int] = {}
    for stage, head in enumerate(given):
        for part in (head, *head.parameters()) if isinstance(head, nn.Module) else ():
            other = first.setdefault(id(part), stage)
            what = "module" if part is head else "parameter"
            rule = f"heads must not share a {what}, as each learns from its own loss"
            got = f"the same one for stages {other} and {stage}"
            require(other == stage, rule, f"{got}: give a builder, or copy.deepcopy it")


class _OnFirst(nn.Module):
    """A head for a tuple of tensors, of which it takes the first."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, value: tuple[Tensor, ...], *shared: Tensor) -> Any:
        return self.module(value[0], *shared)


def _fit(module: nn.Module, example: Value) -> nn.Module:
    """Return a module of the example's first tensor, on its device and in its dtype."""
    first = tensors_of(example)[0]
    module = module.to(first.device, first.dtype)
    return module if isinstance(example, Tensor) else _OnFirst(module)


@dataclass(frozen=True)
class LinearHead(Head):
    """A linear layer on the last dimension: (batch, ..., width) to (batch, ..., num_outputs).

    ``norm`` is a class such as ``nn.LayerNorm``, called with the width, for a norm before it.
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
        first = tensors_of(example)[0]
        checked = self._check(first, "of shape (batch, ..., width)", fits=first.dim() > 1)
        width = checked.shape[-1]
        module: nn.Module = nn.Linear(width, self.num_outputs)
        if self.norm is not None:
            module = nn.Sequential(self.norm(width), module)
        return _fit(module, example)


@dataclass(frozen=True)
class PooledHead(Head):
    """A linear layer on the mean over all dimensions but the batch and the features.

    ``dim`` is the dimension of the features: 1 for (batch, channels, ...), -1 for (batch, ...,
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
        first = tensors_of(example)[0]
        checked = self._check(first, "of two dimensions or more", fits=first.dim() > 1)
        rule = "dim must be given for a PooledHead on three dimensions"
        got = f"None for shape {list(checked.shape)}"
        fix = "dim=1 if it is (batch, channels, length), dim=-1 if it is (batch, length, width)"
        require(self.dim is not None or checked.dim() != 3, rule, f"{got}: {fix}")
        dim = 1 if self.dim is None else self.dim
        linear = nn.Linear(checked.shape[dim], self.num_outputs)
        pooled = tuple(range(2, checked.dim()) if dim == 1 else range(1, checked.dim() - 1))
        return _fit(nn.Sequential(GlobalMean(pooled), linear) if pooled else linear, example)


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
    convolutions, with these output ``channels``, keep the image size and have no bias.
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
        first, shape = tensors_of(example)[0], "of shape (batch, channels, height, width)"
        checked = self._check(first, shape, fits=first.dim() == 4)
        layers: list[nn.Module] = []
        for before, after in pairwise((checked.shape[1], *self.channels)):
            conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
        linear = nn.Linear(self.channels[-1], self.num_outputs)
        return _fit(nn.Sequential(*layers, GlobalMean((2, 3)), linear), example)


@dataclass(frozen=True)
class TiedHead(Head):
    """A head of ``norm(h) @ E.T``, with E the model's embedding weight: (vocabulary, width).

    Maps (batch, ..., width) to (batch, ..., vocabulary). The head does not train E, which belongs
    to the embedding's stage: its module is called as ``module(h, E)``, with E received from that
    stage, and only the norm learns from the head's loss.

    The ``embedding`` is of the model itself, not a copy; ``norm`` a class such as ``nn.RMSNorm``,
    called with the width. None: no norm; then the head has no parameters.
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
        width, first = self.embedding.embedding_dim, tensors_of(example)[0]
        fits = first.dim() > 1 and first.shape[-1] == width
        self._check(first, f"of shape (batch, ..., {width})", fits=fits)
        norm = nn.Identity() if self.norm is None else self.norm(width)
        return _fit(_Tied(norm), example)


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
