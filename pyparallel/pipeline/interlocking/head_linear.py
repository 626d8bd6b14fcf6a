"""A head with one linear layer on the last dimension."""

from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from ...comm import Value
from .head_arguments import check_norm, check_num_outputs, name_of
from .heads import Head


@dataclass(frozen=True)
class LinearHead(Head):
    """A linear layer on the last dimension: (batch, ..., width) to (batch, ..., num_outputs).

    Each token of (batch, length, width) gets its own outputs.

    Args:
        num_outputs: classes, or numbers to predict.
        norm: a class such as ``nn.LayerNorm``, called with the width, for a norm before the linear
            layer. None: no norm.
    """

    num_outputs: int
    norm: type[nn.Module] | None = None

    def __post_init__(self) -> None:
        check_num_outputs(self.num_outputs)
        check_norm(self.norm)

    def __repr__(self) -> str:
        return f"LinearHead(num_outputs={self.num_outputs}, norm={name_of(self.norm)})"

    @override
    def build(self, example: Value) -> nn.Module:
        fits = isinstance(example, Tensor) and example.dim() > 1
        checked = self._check(example, "of shape (batch, ..., width)", fits=fits)
        width = checked.shape[-1]
        module: nn.Module = nn.Linear(width, self.num_outputs)
        if self.norm is not None:
            module = nn.Sequential(self.norm(width), module)
        return module.to(checked.device, checked.dtype)
