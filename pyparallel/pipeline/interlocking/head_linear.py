"""A head with one linear layer, on every token."""

from dataclasses import dataclass

from torch import Tensor, nn

from ...comm import Value
from .head_arguments import check_norm, check_num_outputs, name_of
from .heads import Head


@dataclass(frozen=True)
class LinearHead(Head):
    """One linear layer on the last dimension: (batch, ..., width) to (batch, ..., num_outputs).

    So a token of (batch, length, width) has outputs of its own.

    Args:
        num_outputs: classes, or numbers to predict.
        norm: a class such as ``nn.LayerNorm``, called with the width, whose module comes before
            the linear layer. None: nothing does.
    """

    num_outputs: int
    norm: type[nn.Module] | None = None

    def __post_init__(self) -> None:
        check_num_outputs(self.num_outputs)
        check_norm(self.norm)

    def __repr__(self) -> str:
        return f"LinearHead(num_outputs={self.num_outputs}, norm={name_of(self.norm)})"

    def build(self, example: Value) -> nn.Module:
        """See ``Head.build``."""
        fits = isinstance(example, Tensor) and example.dim() > 1
        checked = self._check(example, "of shape (batch, ..., width)", fits=fits)
        width = checked.shape[-1]
        module: nn.Module = nn.Linear(width, self.num_outputs)
        if self.norm is not None:
            module = nn.Sequential(self.norm(width), module)
        return module.to(checked.device, checked.dtype)
