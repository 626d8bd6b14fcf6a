"""Auto-encoders with explicit weights, and their training with the same weights on all ranks."""

import abc
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from ...comm.collectives import Collectives
from ...training.arguments import check_integer, require

_SLOPE = 0.1  # of LeakyReLU
_MOMENTUM = 0.9
_LARGEST_STEP = 1.0  # of a gradient's norm: heavy-tailed data must not disturb the weights


class AutoEncoder(abc.ABC):
    """An immutable pair of differentiable functions of explicit weights.

    Both should be homogeneous, ``encode(a * values) = a * encode(values)`` for ``a > 0``: gradients
    shrink by orders of magnitude during training, and a code has no scale.
    """

    @abc.abstractmethod
    def init(self, device: torch.device) -> Tensor:
        """Return the initial weights, (num_weights,) float32, the same on all ranks."""

    @abc.abstractmethod
    def encode(self, weights: Tensor, values: Tensor) -> Tensor:
        """Return the flat code of (n,) values; its length depends on n alone."""

    @abc.abstractmethod
    def decode(self, weights: Tensor, code: Tensor, numel: int) -> Tensor:
        """Return the (numel,) values of a code."""


@dataclass(frozen=True)
class ConvAutoEncoder(AutoEncoder):
    """A convolutional auto-encoder: each layer downsamples by 2 (no biases, LeakyReLU).

    The architecture is that of the LGC paper (arXiv 2103.08870), with fewer channels. Convolutions
    are computed as matrix products, which give the same bits on all ranks with the same device
    type; cuDNN's need not. The input is zero-padded to a multiple of the downsampling factor.

    ``channels`` are the output channels of each layer. A code has ``code_channels / 2**layers``
    numbers per value: a quarter by default.
    """

    channels: tuple[int, ...] = (16, 32, 32, 16)
    code_channels: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.channels, "channels must be one or more numbers", "none")
        for index, each in enumerate(self.channels):
            check_integer(f"channels[{index}]", each)
        check_integer("code_channels", self.code_channels)

    @property
    def num_weights(self) -> int:
        """Number of weights of encoder and decoder."""
        return sum(rows * columns for rows, columns in self._shapes)

    @override
    def init(self, device: torch.device) -> Tensor:
        # Normal weights that keep magnitudes from layer to layer (He et al., 2015).
        generator = torch.Generator().manual_seed(self.seed)
        layers = [
            torch.randn(rows * columns, generator=generator, dtype=torch.float32, device="cpu")
            * math.sqrt(2 / columns)
            for rows, columns in self._shapes
        ]
        return torch.cat(layers).to(device)

    @override
    def encode(self, weights: Tensor, values: Tensor) -> Tensor:
        *layers, last = self._matrices(weights)[: len(self.channels) + 1]
        x = functional.pad(values, (0, -len(values) % self._factor))[None]
        for matrix in layers:
            x = functional.leaky_relu(matrix @ _patches(x, width=4, stride=2), _SLOPE)
        return (last @ x).flatten()

    @override
    def decode(self, weights: Tensor, code: Tensor, numel: int) -> Tensor:
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
    """Return x (channels, length) as columns for a convolution: (channels * width, steps)."""
    windows = functional.pad(x, ((width - 1) // 2,) * 2).unfold(1, width, stride)
    return windows.transpose(1, 2).flatten(0, 1)


def _interleave(x: Tensor) -> Tensor:
    """Reshape (2 * channels, length) to (channels, 2 * length)."""
    return x.view(2, -1, x.shape[1]).permute(1, 2, 0).flatten(1)


def init_training_state(auto_encoder: AutoEncoder, device: torch.device) -> dict[str, Tensor]:
    """Return initial weights, momentum and loss (0-d) for `train_step_`."""
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
    """Train one step, so that the mean code over ranks decodes to the mean of the values.

    All ranks call it with their values and the mean of all, both (n,) float32; the weights of the
    state, of ``init_training_state``, stay equal. The loss is relative to the mean square of the
    mean: 1 is no better than decoding to 0. SGD with momentum; a non-finite gradient is skipped.
    """
    if not state["weights"].numel():
        return
    # In float64, in which squares of float32 neither overflow nor underflow.
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
    """Return the decoded mean code, the same on all ranks, and this rank's share, both (numel,).

    The mean of the shares over ranks is the decoded mean, though no rank knows another's: each
    share is the decoder linearized at the mean code, evaluated at this rank's code. The codes'
    deviations from their mean sum to 0, so the tangents do.
    """
    at = mean_code.detach().requires_grad_()
    decoded = auto_encoder.decode(weights.detach(), at, numel)
    # A JVP computed by two VJPs: autograd's forward mode keeps state that threads share.
    cotangent = torch.zeros_like(decoded, requires_grad=True)
    (vjp,) = torch.autograd.grad(decoded, at, cotangent, create_graph=True)
    (tangent,) = torch.autograd.grad(vjp, cotangent, (code - mean_code).detach())
    return decoded.detach(), decoded.detach() + tangent
