"""Top-K sparsification: the largest entries, of a buffer or of each of its chunks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...comm.collectives import Collectives
from ...ops._checks import check_block_size
from ...ops.top_k import sizes_of_chunks
from ...training.arguments import check_in, require
from ..compressor import Message
from ..corrupt_messages import CorruptMessageError, refusing_corrupt
from ..layout import BufferLayout
from ..residual import Residual
from ..state import CompressorState
from .base import IndexSparsifier, Sparsifier, check_values


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
    finds_nonfinite = True

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
        self,
        x: Tensor,
        state: CompressorState,
        collectives: Collectives,
        residual: Residual = None,
        *,
        drops: bool = False,
    ) -> Tensor | None:
        """Average as `Compressor.mean_`; a nan or an inf is sent as the largest.

        On a GPU the values are divided by the number of ranks, in float32: few bytes, and the whole
        mean is not read again. For a power of two that is the same number.
        """
        if not drops and (x.device.type == "cpu" or x.numel() == 0):
            return super().mean_(x, state, collectives, residual)
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
            values, indices, *of_ranks = gathered
            if values.dtype != torch.float32:
                values = values.float().div_(collectives.size)
            messages = list(zip(values, indices, strict=True))
            self._add_up_(messages, state.layout, x, divisor=1)
        return of_ranks[0].view(-1) if drops else None


@dataclass(frozen=True)
class ChunkTopK(Sparsifier):
    """The largest magnitudes of each chunk of a buffer (SparseLoCo, arXiv 2508.15706).

    An index within a chunk takes 12 bits, so that an entry sent takes 14 with ``Chain(ChunkTopK(),
    Statistical())``, and 64 with `TopK`. The rest is lost without error feedback. Chunks are
    neighbors in the flat buffer; the paper's are squares of 64 by 64 entries of a matrix.

    Args:
        k: entries of a chunk that are sent, from 1 to ``chunk``; all of a last chunk that has
            fewer.
        chunk: entries of a chunk, a power of two from 32 to 4096.
    """

    k: int = 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        check_block_size(self.chunk, "chunk")
        require(1 <= self.k <= self.chunk, f"k must be in [1, {self.chunk}]", self.k)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (values, packed indices), as ``ops.top_k_chunks``."""
        state.begin_message(x)
        return ops.top_k_chunks(x, self.k, chunk=self.chunk, residual=residual)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        with refusing_corrupt():
            values, indices = message
            check_values(values, self.num_values((indices,), layout))
            return ops.scatter_chunks(
                values,
                indices,
                self.k,
                chunk=self.chunk,
                numel=layout.numel,
                out=out,
                accumulate=accumulate,
            )

    @override
    def _sum_(self, messages: Iterable[Message], layout: BufferLayout, total: Tensor) -> None:
        each = list(messages)
        values, indices = (torch.stack(parts) for parts in zip(*each, strict=True))
        options: dict[str, Any] = {"chunk": self.chunk, "numel": layout.numel, "out": total}
        try:
            with refusing_corrupt():
                ops.scatter_chunks(values, indices, self.k, **options)
        except CorruptMessageError:
            super()._sum_(each, layout, total)  # one by one: raises with the sender

    @override
    def num_values(self, where: Message, layout: BufferLayout) -> int:
        (_,) = where
        return sizes_of_chunks(layout.numel, self.k, self.chunk)[0]


def count_of(density: float, numel: int) -> int:
    """Return the number of entries of a buffer that are sent."""
    return min(numel, max(1, round(density * numel)))
