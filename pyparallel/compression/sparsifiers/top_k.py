"""The largest entries alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import ops
from ..compressor import Message, check_buffer
from ..layout import BufferLayout
from ..residual import clear_non_finite
from ..state import CompressorState
from ..validation import refusing_corrupt
from .all_gather import AllGatherCompressor
from .base import Sparsifier


@dataclass(frozen=True)
class TopK(Sparsifier, AllGatherCompressor):
    """The largest magnitudes of a buffer (Aji and Heafield, EMNLP 2017, arXiv 1704.05021).

    What is not sent is lost, unless by ``ErrorFeedback(TopK(...))``, without which few models
    train. A message takes 8 bytes an entry that it holds: values as float32 and their indices.

    Args:
        density: the share of a buffer's entries that are sent, in (0, 1]; of a buffer that is not
            empty, at least one.
    """

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def unbiased(self) -> bool:
        """No."""
        return False

    def contraction(self, layout: BufferLayout) -> float | None:
        """The share that is sent."""
        return count_of(self.density, layout.numel) / max(1, layout.numel)

    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        """With a guess of the smallest magnitude that will be sent."""
        threshold = torch.zeros((), dtype=torch.float32, device=device)
        return CompressorState(layout, rank, hints={"threshold": threshold})

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`: (values, indices)."""
        check_buffer(x, state.layout)
        state.step += 1
        count = count_of(self.density, x.numel())
        hint = state.hints["threshold"]
        values, indices = ops.top_k(x, count, residual=residual, threshold=hint)
        clear_non_finite(residual, values)
        return values, indices

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`."""
        with refusing_corrupt():
            values, indices = message
            if accumulate:
                return ops.scatter_add_(out, values, indices)
            # Apart from out, which a corrupt message must leave as it is.
            return out.copy_(ops.scatter_add_(torch.zeros_like(out), values, indices))

    def num_values(self, where: Message, layout: BufferLayout) -> int:
        """As `Sparsifier.num_values`."""
        (indices,) = where
        return indices.numel()


def count_of(density: float, numel: int) -> int:
    """How many entries of a buffer are sent."""
    return min(numel, max(1, round(density * numel)))


def check_density(density: float) -> None:
    """Refuse what is no share."""
    if not 0 < density <= 1:
        raise ValueError(f"density must be a share of the entries, in (0, 1], got {density!r}")
