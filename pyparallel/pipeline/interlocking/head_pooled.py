"""A head with one linear layer on the mean over an image or a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from ...comm import Value
from .head_arguments import check_num_outputs
from .heads import Head


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
        check_num_outputs(self.num_outputs)
        if self.dim not in (None, 1, -1) or isinstance(self.dim, bool):
            raise ValueError(
                f"dim must be 1, -1 or None, got {self.dim!r}: 1 for (batch, channels, ...), -1 "
                "for (batch, ..., width)"
            )

    @override
    def build(self, example: Value) -> nn.Module:
        fits = isinstance(example, Tensor) and example.dim() > 1
        checked = self._check(example, "of two dimensions or more", fits=fits)
        if self.dim is None and checked.dim() == 3:
            raise ValueError(
                "dim must be given for a PooledHead on three dimensions, got None for shape "
                f"{list(checked.shape)}: dim=1 if it is (batch, channels, length), dim=-1 if it is "
                "(batch, length, width)"
            )
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
