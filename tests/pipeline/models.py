"""Models of layers whose backwards read weights in different ways."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import _muon

from pyparallel.optim import AdamW as FusedAdamW
from pyparallel.pipeline import build
from tests.pipeline.reference import last_step

WIDTH = 6
SPLITS = {1: [], 2: [6], 4: [3, 6, 9], 8: [1, 2, 4, 6, 8, 9, 11]}  # of build_layers, by stages
SPLIT_WITH_BARE_STAGE = [5, 7, 9]  # the second stage has no parameters


def in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only, and a lower rate for the rest."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "lr": 0.005, "weight_decay": 0.0},
        {"params": [p for p in parameters if p.dim() == 0]},  # none
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=EPS)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., arXiv 2302.06675), instead of the packages that have it."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(each)
                    each.mul_(1 - lr * group["weight_decay"])
                    each.sub_(state["exp_avg"].lerp(each.grad, 1 - beta1).sign_(), alpha=lr)
                    state["exp_avg"].lerp_(each.grad, 1 - beta2)


def lion_of(module: str) -> type[Lion]:
    """Return Lion as the class of another module."""
    return type("Lion", (Lion,), {"__module__": module, "__qualname__": "Lion"})


LIONS = [lion_of("lion_pytorch.lion_pytorch"), lion_of("timm.optim.lion")]


class PredictedAdamW(torch.optim.AdamW):
    """AdamW with its rule of prediction as a method, in any dtype."""

    def displacement(self, parameter, state, group, horizon):
        return -group["lr"] * horizon * last_step(group, state, parameter.grad)


def matrices_by(
    first: type[torch.optim.Optimizer],
    rest: type[torch.optim.Optimizer],
    parameters: list[nn.Parameter],
) -> list[torch.optim.Optimizer]:
    """Return an optimizer for the matrices, if there are any, and another one for the rest."""
    matrices = [p for p in parameters if p.dim() == 2]
    of_matrices = [first(matrices, lr=0.02, weight_decay=0.1)] if matrices else []
    others = [p for p in parameters if p.dim() != 2]
    return [*of_matrices, rest(others, lr=0.01, weight_decay=0.1, eps=0.01)]


@contextmanager
def smooth_muon() -> Iterator[None]:
    """Give Muon a smooth map instead of Newton-Schulz in bfloat16, which magnifies rounding."""
    before = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = lambda g, *_: g / (1 + g.square().mean()).sqrt()
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = before


EPS = 1e-4  # a bias before a normalization has no gradient but rounding, which must not count
OPTIMIZERS = {
    "groups": in_groups,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1, eps=EPS),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, 0.01, weight_decay=0.1, eps=0.01),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, 0.1, eps=0.01),
    "Muon, AdamW": partial(matrices_by, torch.optim.Muon, torch.optim.AdamW),
    "Muon, fused AdamW": partial(matrices_by, torch.optim.Muon, FusedAdamW),
    "Muon, PredictedAdamW": partial(matrices_by, torch.optim.Muon, PredictedAdamW),
    "Lion, PredictedAdamW": partial(matrices_by, LIONS[0], PredictedAdamW),
}


class Matmul(nn.Module):
    """``x @ w``: autograd saves the parameter itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, value: Tensor) -> Tensor:
        return value @ self.weight


class Conv(nn.Module):
    """A convolution along the features, as one channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, value: Tensor) -> Tensor:
        return self.conv(value.unsqueeze(1)).squeeze(1)


class Fork(nn.Module):
    """Returns a tuple with a mask, a tensor that is not used, and one that is detached."""

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        return value, value > 0, value.tanh(), 2 * value, value.detach()


class Join(nn.Module):
    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        value, positive, bent, _, detached = values
        return torch.where(positive, value, bent) + bent + 0.1 * detached


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition that trains."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) + self.up(self.down(value))


# The layers that train where the others are frozen; stages are three layers each.
TRAINED = {
    "the last layers": [8, 10, 11],  # no stage before needs a gradient
    "the first layer": [0],  # gradients go through three stages without anything to train
    "adapters": [4, 10],  # in one layer of every second stage
}


def build_layers(dtype: torch.dtype = torch.float64, trained: str = "") -> list[nn.Module]:
    """Return twelve layers, to be split by SPLITS; the same ones every time."""
    torch.manual_seed(11)
    layers = [
        # The first one is no Linear, whose input gradients would not be computed.
        *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Conv()),
        *(Matmul(), nn.BatchNorm1d(WIDTH), Fork()),
        *(Join(), Conv(), nn.LayerNorm(WIDTH)),
        *(nn.Tanh(), Matmul(), nn.Linear(WIDTH, 2)),
    ]
    layers[2].conv.bias.requires_grad_(False)
    for number, layer in enumerate(layers) if trained else ():
        if number not in TRAINED[trained]:
            layer.requires_grad_(False)
        elif trained == "adapters":
            layers[number] = Adapted(layer)
    return [layer.to(dtype) for layer in layers]


def build_calls(
    count: int, samples: int, dtype: torch.dtype = torch.float64, outputs: int = 2
) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and targets of ``count`` steps; the same ones every time."""
    torch.manual_seed(12)
    inputs = [torch.randn(samples, WIDTH, dtype=dtype) for _ in range(count)]
    return [(each, each[:, :outputs].sin()) for each in inputs]


class Shift(nn.Module):
    """Adds a weight to one feature: with a squared loss, a quadratic in all such weights."""

    def __init__(self, feature: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.feature = feature

    def forward(self, value: Tensor) -> Tensor:
        return value + self.weight * torch.eye(value.shape[1], dtype=value.dtype)[self.feature]


def as_on_gpus(late=True):
    """Have trainers that are built inside decide late whether losses are finite, as on GPUs."""
    return mock.patch.object(build, "waits_for_gpu", return_value=late)
