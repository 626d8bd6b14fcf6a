"""Top-K sparsification: the largest entries."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...comm.collectives import Collectives
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

    @override
    def mean_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> None:
        if x.device.type == "cpu" or x.numel() == 0:
            super().mean_(x, state, collectives, residual)
        else:
            self._mean_of_shares_(x, state, collectives, residual, drops=False)

    @override
    def mean_of_finite_(
        self, x: Tensor, state: CompressorState, collectives: Collectives, residual: Residual = None
    ) -> Tensor:
        """Average as `Compressor.mean_of_finite_`: nan and inf are sent as the largest."""
        if x.numel() == 0:
            return super().mean_of_finite_(x, state, collectives, residual)
        return self._mean_of_shares_(x, state, collectives, residual, drops=True)[-1].view(-1)

    def _mean_of_shares_(
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Residual,
        *,
        drops: bool,
    ) -> list[Tensor]:
        """Average as ``mean_``, or with ``drops`` as ``mean_of_finite_``; return what is gathered.

        The values are divided by the number of ranks, in float32: few bytes, and the whole mean is
        not read again. For a power of two that is the same number.
        """
        with collectives.stats.encoding():
            message = values, _ = self.compress(x, state, residual)
            if drops:
                is_bad = (torch.linalg.vector_norm(values, torch.inf) * 0).isnan()
                values.masked_fill_(is_bad, 0.0)
                if residual is not None:
                    ops.add_or_clear_(residual, clear=is_bad)
                message = *message, is_bad.view(1)
            if values.dtype == torch.float32:
                values.div_(collectives.size)
        gathered = collectives.all_gather_rows(message)
        with collectives.stats.decoding():
            values, indices, *_ = gathered
            if values.dtype != torch.float32:
                values = values.float().div_(collectives.size)
            messages = list(zip(values, indices, strict=True))
            self._add_up_(messages, state.layout, x, divisor=1)
        return gathered


def count_of(density: float, numel: int) -> int:
    """Return the number of entries of a buffer that are sent."""
    return min(numel, max(1, round(density * numel)))
