"""The networks of the examples: two for digits, and a transformer for bytes."""

import torch
from torch import Tensor, nn


def digits_net() -> nn.Sequential:
    """Build a convolutional network from (batch, 1, 8, 8) to (batch, 10) logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def wide_digits_net() -> nn.Sequential:
    """Build a wider one with BatchNorm, for subnets to be cut from."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 16, 256), nn.BatchNorm1d(256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of correct predictions in evaluation mode."""
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return float(right)


def count(model: nn.Module) -> int:
    """Return the number of weights."""
    return sum(parameter.numel() for parameter in model.parameters())


def build_transformer(context: int, width: int, num_layers: int, num_heads: int) -> nn.Sequential:
    """Build a decoder from (batch, length <= context) int64 to (batch, length, 256) logits."""
    letters = Letters(context, width)
    blocks = [Block(width, num_heads) for _ in range(num_layers)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
    model = nn.Sequential(letters, *blocks, head)
    nn.init.normal_(letters.bytes.weight, std=0.02)
    nn.init.normal_(letters.places.weight, std=0.02)
    return model


def byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss in nats per byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Letters(nn.Module):
    """Embedding of each byte, its position, and (a causal convolution) the bytes just before."""

    def __init__(self, context: int, width: int, reach: int = 4) -> None:
        super().__init__()
        self.reach = reach
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.pieces = nn.Conv1d(width, width, reach)

    def forward(self, text: Tensor) -> Tensor:
        letters = self.bytes(text)
        past = nn.functional.pad(letters.transpose(1, 2), (self.reach - 1, 0))
        pieces = self.pieces(past).transpose(1, 2)
        return letters + pieces + self.places.weight[: text.shape[1]]


class Block(nn.Module):
    """Causal attention, then a feed-forward of two linear layers."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention = nn.LayerNorm(width)
        self.before_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))
