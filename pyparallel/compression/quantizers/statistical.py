"""Statistical quantization: bins around the mean of a block."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ...ops.pack_signs import sizes_of_bins
from ..compressor import Message
from ..corrupt_messages import refusing_corrupt
from ..layout import BufferLayout
from ..residual import Residual
from ..state import CompressorState
from .blockwise import BlockwiseCompressor


@dataclass(frozen=True)
class Statistical(BlockwiseCompressor):
    """Bins over six standard deviations of a block, each decoded to the mean of its entries.

    MuLoCo sends its outer steps so (Therien et al., 2025, arXiv 2505.23725), SparseLoCo the values
    of the entries that it selects (arXiv 2508.15706): ``Chain(ChunkTopK(), Statistical(2))``, 0.22
    bits an entry of the buffer. ``ops.quantize_statistical`` documents the rule, nan and inf.

    Args:
        bits: of an entry: 2, 4 or 8. A block also sends its 2**bits means, in float32: with 2 bits
            128 bits a block, nothing beside 4096 entries; with 4 bits 512; with 8 bits 8192, which
            are two more bits an entry: `Int8` takes fewer bytes.
        block_size: entries that share the means, a power of two from 32 to 4096.
    """

    bits: int = 2
    block_size: int = 4096
    dtypes = (torch.uint8, torch.float32)
    finds_nonfinite = True  # a table is nan for a block with a nan or an inf

    def __post_init__(self) -> None:
        sizes_of_bins(0, self.bits, self.block_size)

    @property
    @override
    def granularity(self) -> int:
        return self.block_size

    @override
    def sizes(self, numel: int) -> tuple[int, ...]:
        """Return the lengths of codes (bytes) and tables (a mean per bin of each block)."""
        return sizes_of_bins(numel, self.bits, self.block_size)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return (codes, tables)."""
        state.begin_message(x)
        kind = {"bits": self.bits, "block_size": self.block_size}
        return ops.quantize_statistical(x, **kind, residual=residual)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        with refusing_corrupt():
            codes, tables = message
            return ops.dequantize_statistical(
                codes,
                tables,
                bits=self.bits,
                block_size=self.block_size,
                numel=out.numel(),
                out=out,
                accumulate=accumulate,
            )
