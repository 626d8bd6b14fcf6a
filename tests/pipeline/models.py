"""Layers whose backward reads a weight, each in its own way, and models made of them."""

import torch
from torch import Tensor, nn

WIDTH = 6


class Matmul(nn.Module):
    """``x @ w``: autograd saves the parameter itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, value: Tensor) -> Tensor:
        return value @ self.weight


class Conv(nn.Module):
    """Along the features, as one channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, value: Tensor) -> Tensor:
        return self.conv(value.unsqueeze(1)).squeeze(1)


class Fork(nn.Module):
    """The input, and something made of it: a tuple travels to the next stage."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value, value.tanh()


class Join(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0] + values[1]


def build_layers(dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Four stages begin at every third layer: (3, 6, 9), and two of them at (6,)."""
    torch.manual_seed(11)
    layers = [
        *(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Conv()),
        *(Matmul(), nn.BatchNorm1d(WIDTH), Fork()),
        *(Join(), Conv(), nn.LayerNorm(WIDTH)),
        *(nn.Tanh(), Matmul(), nn.Linear(WIDTH, 2)),
    ]
    return [layer.to(dtype) for layer in layers]


def build_calls(count: int, samples: int, dtype: torch.dtype = torch.float64) -> list:
    """Inputs and targets of so many calls."""
    torch.manual_seed(12)
    inputs = [torch.randn(samples, WIDTH, dtype=dtype) for _ in range(count)]
    return [(each, each[:, :2].sin()) for each in inputs]
