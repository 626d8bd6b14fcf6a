"""Codes that are learnt: networks of explicit weights, and how all ranks train the same one."""

import abc
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...comm.collectives import Collectives

_SLOPE = 0.1  # of LeakyReLU
_MOMENTUM = 0.9
_LARGEST_STEP = 1.0  # of a gradient's norm: data with heavy tails must not throw the weights off


class AutoEncoder(abc.ABC):
    """An immutable description of two functions of weights, which autograd can see through.

    Both should be homogeneous, ``encode(a * values) = a * encode(values)`` for ``a > 0``: gradients
    shrink by orders of magnitude while a model trains, and a code carries no scale.
    """

    @abc.abstractmethod
    def init(self, device: torch.device) -> Tensor:
        """(num_weights,) float32: where learning begins, the same on all ranks."""

    @abc.abstractmethod
    def encode(self, weights: Tensor, values: Tensor) -> Tensor:
        """The code of (n,) numbers, flat; its length depends on n alone."""

    @abc.abstractmethod
    def decode(self, weights: Tensor, code: Tensor, numel: int) -> Tensor:
        """(numel,) numbers."""


@dataclass(frozen=True)
class ConvAutoEncoder(AutoEncoder):
    """Convolutions over neighbors: down by 2 in each layer, and up again (no biases, LeakyReLU).

    The shape is that of the LGC paper (arXiv 2103.08870), with fewer channels. Convolutions are
    products of matrices here, which give the same bits on every rank of one kind; those of cuDNN
    need not. Runs that no code divides evenly are padded with zeros.

    Args:
        channels: behind each layer; as many layers as there are. A code has
            ``code_channels / 2**layers`` numbers for each one encoded: a quarter by default.
        code_channels: of the code.
        seed: of the first weights.
    """

    channels: tuple[int, ...] = (16, 32, 32, 16)
    code_channels: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.channels or min(*self.channels, self.code_channels) < 1:
            raise ValueError(
                "channels must be one or more numbers >= 1, and code_channels too, got "
                f"{self.channels} and {self.code_channels}"
            )

    @property
    def num_weights(self) -> int:
        """Of encoder and decoder together."""
        return sum(rows * columns for rows, columns in self._shapes)

    def init(self, device: torch.device) -> Tensor:
        """As `AutoEncoder.init`: normal, such that layers keep magnitudes (He et al., 2015)."""
        generator = torch.Generator().manual_seed(self.seed)
        layers = [
            torch.randn(rows * columns, generator=generator, dtype=torch.float32)
            * math.sqrt(2 / columns)
            for rows, columns in self._shapes
        ]
        return torch.cat(layers).to(device)

    def encode(self, weights: Tensor, values: Tensor) -> Tensor:
        """As `AutoEncoder.encode`."""
        *layers, last = self._matrices(weights)[: len(self.channels) + 1]
        x = functional.pad(values, (0, -len(values) % self._factor))[None]
        for matrix in layers:
            x = functional.leaky_relu(matrix @ _patches(x, width=4, stride=2), _SLOPE)
        return (last @ x).flatten()

    def decode(self, weights: Tensor, code: Tensor, numel: int) -> Tensor:
        """As `AutoEncoder.decode`."""
        *layers, last = self._matrices(weights)[len(self.channels) + 1 :]
        x = code.view(self.code_channels, -1)
        for matrix in layers:
            x = functional.leaky_relu(_interleave(matrix @ _patches(x, width=3, stride=1)), _SLOPE)
        return (last @ x).flatten()[:numel]

    @property
    def _factor(self) -> int:
        return 1 << len(self.channels)

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        down = itertools.pairwise((1, *self.channels))
        up = itertools.pairwise((self.code_channels, *reversed(self.channels)))
        return [
            *((outputs, 4 * inputs) for inputs, outputs in down),
            (self.code_channels, self.channels[-1]),
            *((2 * outputs, 3 * inputs) for inputs, outputs in up),
            (1, self.channels[0]),
        ]

    def _matrices(self, weights: Tensor) -> list[Tensor]:
        parts = weights.split([rows * columns for rows, columns in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _patches(x: Tensor, *, width: int, stride: int) -> Tensor:
    """(channels * width, steps): what a kernel sees at each step over x (channels, length)."""
    windows = functional.pad(x, ((width - 1) // 2,) * 2).unfold(1, width, stride)
    return windows.transpose(1, 2).flatten(0, 1)


def _interleave(x: Tensor) -> Tensor:
    """(channels, 2 * length) out of (2 * channels, length)."""
    return x.view(2, -1, x.shape[1]).permute(1, 2, 0).flatten(1)


def init_training_state(auto_encoder: AutoEncoder, device: torch.device) -> dict[str, Tensor]:
    """What `learn_` goes on with: weights, their momentum, and the last loss (0-d)."""
    weights = auto_encoder.init(device)
    loss = torch.full((), math.nan, dtype=torch.float32, device=device)
    return {"weights": weights, "velocity": torch.zeros_like(weights), "loss": loss}


@torch.enable_grad()
def train_step_(
    auto_encoder: AutoEncoder,
    state: dict[str, Tensor],
    values: Tensor,
    mean: Tensor,
    collectives: Collectives,
    learning_rate: float,
) -> None:
    """Take a step towards codes whose mean over ranks decodes to the mean of what was encoded.

    All ranks call it together, and have the same weights afterwards: gradients are summed over
    ranks. The loss is the mean square of what is lost, by that of the mean: 1 is as bad as nothing.
    SGD with momentum; a gradient that is not finite is left out.

    Args:
        auto_encoder: whose weights they are.
        memory: of `start_learning`. Written.
        values: (n,) float32, of this rank.
        mean: (n,) float32, of all ranks' values.
        ranks: all of them.
        learning_rate: of SGD.
    """
    if not state["weights"].numel():
        return
    # In float64, where squares of no float32 are too large or too small.
    scale = mean.double().square().mean().sqrt().float()
    scale.clamp_min_(torch.finfo(torch.float32).tiny)
    weights = state["weights"].detach().clone().requires_grad_()
    code = auto_encoder.encode(weights, values / scale)
    mean_code = code.detach().clone()
    collectives.all_reduce_(mean_code)
    mean_code.div_(collectives.size).requires_grad_()
    decoded = auto_encoder.decode(weights, mean_code, mean.numel())
    loss = functional.mse_loss(decoded, mean / scale)
    of_decoder, of_code = torch.autograd.grad(loss, (weights, mean_code))
    (of_encoder,) = torch.autograd.grad(code, weights, of_code)
    gradient = of_encoder.add_(of_decoder).div_(collectives.size)
    collectives.all_reduce_(gradient)
    state["loss"].copy_(loss.detach())
    _descend_(state, gradient, learning_rate)


@torch.no_grad()
def _descend_(state: dict[str, Tensor], gradient: Tensor, learning_rate: float) -> None:
    norm = gradient.norm()
    gradient.mul_(_LARGEST_STEP / norm.clamp_min(_LARGEST_STEP))
    velocity = state["velocity"] * _MOMENTUM + gradient
    is_finite = norm.isfinite()
    state["velocity"].copy_(torch.where(is_finite, velocity, state["velocity"]))
    state["weights"].sub_(torch.where(is_finite, learning_rate * velocity, 0))


@torch.enable_grad()
def decode_mean(
    auto_encoder: AutoEncoder, weights: Tensor, code: Tensor, mean_code: Tensor, numel: int
) -> tuple[Tensor, Tensor]:
    """What the mean of all ranks' codes decodes to, and which share in it is this rank's.

    Shares add up to the whole though no rank knows another's: each is the decoder at the mean code,
    continued along its tangent to the code of the rank. The codes' distances from their mean add up
    to 0, so the tangents do. Of a linear decoder the share is what the rank's own code decodes to.

    Args:
        auto_encoder: whose codes they are.
        weights: likewise, the same on all ranks.
        code: of this rank.
        mean_code: of all ranks.
        numel: how many numbers were encoded.

    Returns:
        both (numel,): the decoded mean, the same on all ranks, and this rank's share.
    """
    at = mean_code.detach().requires_grad_()
    decoded = auto_encoder.decode(weights.detach(), at, numel)
    # A product with the Jacobian out of two with its transpose: autograd's forward mode keeps
    # state that threads share.
    cotangent = torch.zeros_like(decoded, requires_grad=True)
    (pulled_back,) = torch.autograd.grad(decoded, at, cotangent, create_graph=True)
    (tangent,) = torch.autograd.grad(pulled_back, cotangent, (code - mean_code).detach())
    return decoded.detach(), decoded.detach() + tangent
