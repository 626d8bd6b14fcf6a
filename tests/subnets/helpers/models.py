"""Models that the tests cut, and the rules for them."""

import torch
from torch import Tensor, nn

from examples.models import Block
from pyparallel.subnets import FeedForward, Heads, Hidden


def mlp(hidden: int = 8, second: int = 12) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, second), nn.Tanh(), nn.Linear(second, 3)
    )


def one_width(hidden: int = 9) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def mlp_with_norms() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.PReLU(8)),
        nn.Dropout(0.0),
        nn.Linear(8, 9, bias=False),
        nn.PReLU(),
        nn.Linear(9, 3),
    )


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    )


class BasicBlock(nn.Module):
    """Two convolutions with a residual path around them."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(inner)))


def residual() -> nn.Sequential:
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        BasicBlock(4, 7),
        BasicBlock(4, 6),
        nn.Sequential(pool, nn.Flatten(), nn.Linear(4, 3)),
    )


RESIDUAL_RULES = {"[12]": Hidden("conv1", "conv2", norms="bn1")}


class Attention(nn.Module):
    """Attention whose queries, keys and values are layers of their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def transformer() -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 3))
    return nn.Sequential(nn.Linear(5, 16), Block(16, 4), Attention(16, 4), head)


TRANSFORMER_RULES = {
    "1": (Heads(qkv="qkv", project="project"), FeedForward("mlp.0", "mlp.2")),
    "2": Heads(queries="q", keys="k", values="v", project="out", attribute="heads"),
}
