"""A head with one linear layer, on the mean of an image or a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ...comm import Value
from .head_arguments import check_num_outputs
from .heads import Head


@dataclass(frozen=True)
class PooledHead(Head):
    """One linear layer on the mean over all but the samples and the features.

    Args:
        num_outputs: classes, or numbers to predict.
        dim: the dimension of the features: 1 for what convolutions make, (batch, channels, ...),
            and -1 for tokens, (batch, length, width). None: 1, but three dimensions are refused,
            as they may be either.
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

    def build(self, example: Value) -> nn.Module:
        """See ``Head.build``."""
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
        module = nn.Sequential(Mean(pooled), linear) if pooled else linear
        return module.to(checked.device, checked.dtype)


class Mean(nn.Module):
    """The mean over some dimensions, which it takes away."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, value: Tensor) -> Tensor:
        """(d0, d1, ...) to the same without those dimensions."""
        return value.mean(self.dims)

    def extra_repr(self) -> str:
        """The dimensions, as in any layer's ``repr``."""
        return f"dims={self.dims}"
