"""Top-K sparsification: the largest entries."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...training.arguments import check_in
from ..compressor import Message
from ..layout import BufferLayout
from ..residual import Residual
from ..state import CompressorState
from .base import IndexSparsifier


@dataclass(frozen=True)
class TopK(IndexSparsifier):
    """The largest magnitudes of a buffer (Aji and Heafield, EMNLP 2017, arXiv 1704.05021).

    The rest is lost without ``ErrorFeedback(TopK(...))``, which most models need to train. A
    message takes 8 bytes per entry sent: values as float32 and indices.

    Args:
        density: fraction of a buffer's entries that are sent, in (0, 1]; at least one entry of a
            buffer that is not empty.
    """

    density: float

    def __post_init__(self) -> None:
        check_in("density", self.density, "(0, 1]")

    @override
    def init(self, layout: BufferLayout, device: torch.device, rank: int = 0) -> CompressorState:
        threshold = torch.zeros((), dtype=torch.float32, device=device)
        return CompressorState(layout, rank, hints={"threshold": threshold})

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (values, indices)."""
        state.begin_message(x)
        count = count_of(self.density, x.numel())
        hint = state.hints["threshold"]
        return ops.top_k(x, count, residual=residual, threshold=hint)


def count_of(density: float, numel: int) -> int:
    """Return the number of entries of a buffer that are sent."""
    return min(numel, max(1, round(density * numel)))
