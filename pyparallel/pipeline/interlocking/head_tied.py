"""A language model's head that reads the embedding's weight."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ...comm import Value
from .head_arguments import check_norm, name_of
from .heads import Head


@dataclass(frozen=True)
class TiedHead(Head):
    """A head of ``norm(h) @ E.T``, with E the model's embedding weight: (vocabulary, width).

    Maps (batch, ..., width) to (batch, ..., vocabulary). The head does not train E, which belongs
    to the embedding's stage: its module is called as ``module(h, E)``, with E received from that
    stage, and only the norm learns from the head's loss.

    Args:
        embedding: of the model itself, not a copy.
        norm: a class such as ``nn.RMSNorm``, called with the width. None: no norm; then the head
            has no parameters.
    """

    embedding: nn.Embedding
    norm: type[nn.Module] | None = nn.LayerNorm

    def __post_init__(self) -> None:
        weight = getattr(self.embedding, "weight", None)
        if not (isinstance(self.embedding, nn.Embedding) and isinstance(weight, nn.Parameter)):
            raise ValueError(
                "embedding must be the model's nn.Embedding, with a parameter as its weight, got "
                f"{type(self.embedding).__name__} with {type(weight).__name__}"
            )
        check_norm(self.norm)

    def __repr__(self) -> str:
        return f"TiedHead(embedding={self.embedding!r}, norm={name_of(self.norm)})"

    @property
    @override
    def shared(self) -> nn.Parameter:
        assert isinstance(self.embedding.weight, nn.Parameter)
        return self.embedding.weight

    @override
    def build(self, example: Value) -> nn.Module:
        # Only the width is read: on other ranks than the embedding's the weight is a stale copy.
        width = self.embedding.embedding_dim
        fits = isinstance(example, Tensor) and example.dim() > 1 and example.shape[-1] == width
        checked = self._check(example, f"of shape (batch, ..., {width})", fits=fits)
        norm = nn.Identity() if self.norm is None else self.norm(width)
        return _Tied(norm).to(checked.device, checked.dtype)


class _Tied(nn.Module):
    """A norm, then a product with a weight passed as an argument."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, value: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(self.norm(value), weight.detach().to(value.dtype))
