"""Ternary compression: two bits per entry and a scale per block."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from ... import ops
from ...ops._checks import check_block_size
from ..compressor import Message
from ..corrupt_messages import refusing_corrupt
from ..layout import BufferLayout
from ..state import CompressorState
from .blockwise import BlockwiseCompressor


@dataclass(frozen=True, kw_only=True)
class Ternary(BlockwiseCompressor):
    """-1, 0 or 1 times a scale (TernGrad, Wen et al., NeurIPS 2017, arXiv 1705.07878).

    The scale is the block's largest magnitude, and an entry is sent with probability ``|entry| /
    scale``, which is unbiased. A block with an inf or a nan decodes to nan everywhere and keeps its
    old residual; one whose largest magnitude is below 2**-100 is sent as zeros.

    With a residual, the draws are the same and the scale is the mean magnitude of the drawn
    entries, which minimizes the error. With the largest magnitude a message is farther from a block
    than 0 is, and residuals would grow from step to step.

    Args:
        block_size: entries per scale, a power of two from 32 to 4096. Larger blocks have a larger
            variance: the paper clips large entries instead, which is biased.
        seed: seed of the random draws.
    """

    block_size: int = 256
    seed: int = 0
    unbiased = True

    def __post_init__(self) -> None:
        check_block_size(self.block_size)

    @property
    @override
    def granularity(self) -> int:
        return self.block_size

    @override
    def sizes(self, numel: int) -> tuple[int, ...]:
        """Return the lengths of codes (four per byte) and scales (one per block)."""
        return -(-numel // 4), -(-numel // self.block_size)

    @override
    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """Return (codes, scales), as ``ops.quantize`` documents them."""
        state.begin_message(x)
        return ops.quantize(
            x,
            bits=2,
            format="ternary",
            block_size=self.block_size,
            residual=residual,
            seed=state.seed(self.seed),
            offset=state.step,
        )

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        with refusing_corrupt():
            codes, scales = message
            return ops.dequantize(
                codes,
                scales,
                bits=2,
                format="ternary",
                block_size=self.block_size,
                numel=out.numel(),
                out=out,
                accumulate=accumulate,
            )
