"""Sign compression: one bit per entry."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...ops._checks import check_block_size
from ..compressor import Message
from ..corrupt_messages import refusing_corrupt
from ..layout import BufferLayout
from ..residual import Residual
from ..state import CompressorState
from .blockwise import BlockwiseCompressor


@dataclass(frozen=True)
class Sign(BlockwiseCompressor):
    """Signs times the mean magnitude of their block (Karimireddy et al., arXiv 1901.09847).

    Most of x is lost in a message, so use ``ErrorFeedback(Sign())``. ``ops.pack_signs`` documents
    how nan and inf are encoded.

    Args:
        block_size: entries per scale, a power of two from 32 to 4096.
    """

    block_size: int = 1024
    dtypes = (torch.uint8, torch.float32)
    finds_nonfinite = True

    def __post_init__(self) -> None:
        check_block_size(self.block_size)

    @property
    @override
    def granularity(self) -> int:
        return self.block_size

    @override
    def sizes(self, numel: int) -> tuple[int, ...]:
        """Return the lengths of packed signs (bytes) and scales (one per block)."""
        return -(-numel // 8), -(-numel // self.block_size)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (words, scales)."""
        state.begin_message(x)
        return ops.pack_signs(x, block_size=self.block_size, residual=residual)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        with refusing_corrupt():
            words, scales = message
            return ops.unpack_signs(
                words,
                scales,
                block_size=self.block_size,
                numel=out.numel(),
                out=out,
                accumulate=accumulate,
            )
