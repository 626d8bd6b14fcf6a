"""Small layers whose results depend neither on BLAS nor on the vector width.

Products are element-wise and sums have at most four terms. Initial values are multiples of 1/8,
drawn as integers.
"""

import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 3


def numbers(shape: tuple[int, ...], *names: object) -> Tensor:
    """Return multiples of 1/8 from -1 to 1 that are determined by these names."""
    seed = zlib.crc32("/".join(map(str, names)).encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator) / 8


def batch(step: int, samples: int = 1, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a rank; by default of this one."""
    shape, names = (samples, WIDTH), (dist.get_rank() if rank is None else rank, step)
    return numbers(shape, "inputs", *names) + 1, numbers(shape, "targets", *names)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over samples and features."""
    return (outputs - targets).square().mean()


class Scale(nn.Module):
    """Scale and shift each feature; count the calls in a buffer."""

    def __init__(self, name: str = "scale") -> None:
        super().__init__()
        self.shift = nn.Parameter(numbers((WIDTH,), name, "shift") / 2)
        self.scale = nn.Parameter(1 + numbers((WIDTH,), name, "scale") / 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return value * self.scale + self.shift


class Linear(nn.Linear):
    """A linear layer without BLAS."""

    def __init__(self, *shape: int, bias: bool = False, name: str = "") -> None:
        super().__init__(*shape, bias=bias)
        for key, parameter in self.named_parameters():
            parameter.data.copy_(numbers(tuple(parameter.shape), name, key))

    def forward(self, value: Tensor) -> Tensor:
        total = (value.unsqueeze(-2) * self.weight).sum(-1)
        return total if self.bias is None else total + self.bias


class Small(nn.Module):
    """A matrix, two vectors and a buffer; DistributedDataParallel keeps this order of buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Scale()
        self.first = Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(nn.functional.leaky_relu(self.first(value), 0.25))
