"""One bit an entry."""

from dataclasses import dataclass

from torch import Tensor

from ... import ops
from ...ops._checks import check_block_size
from ..compressor import Message, check_buffer
from ..layout import BufferLayout
from ..state import CompressorState
from ..validation import refusing_corrupt
from .blockwise import BlockwiseCompressor


@dataclass(frozen=True)
class Sign(BlockwiseCompressor):
    """Signs, times the mean magnitude of their block (Karimireddy et al., arXiv 1901.09847).

    What a message loses is most of x, so use ``ErrorFeedback(Sign())``. See ``ops.pack_signs`` for
    what becomes of nan and inf.

    Args:
        block_size: entries that share a scale, a power of two from 32 to 4096.
    """

    block_size: int = 1024

    def __post_init__(self) -> None:
        check_block_size(self.block_size)

    @property
    def unbiased(self) -> bool:
        """No."""
        return False

    @property
    def granularity(self) -> int:
        """A block, of whole bytes."""
        return self.block_size

    def contraction(self, layout: BufferLayout) -> float | None:
        """One over a block's entries, what is left where all but one of them are 0.

        Exactly it is ``|x|_1**2 / (n |x|_2**2)`` of a block of n: 2 / pi for normally distributed
        entries. A block whose mean magnitude is below 2**-100 is sent as 0: float32 knows no such
        squares.
        """
        return 1 / max(1, min(self.block_size, layout.numel))

    def sizes(self, numel: int) -> tuple[int, ...]:
        """A bit per entry, in bytes, and a scale per block."""
        return -(-numel // 8), -(-numel // self.block_size)

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`: (words, scales)."""
        check_buffer(x, state.layout)
        state.step += 1
        return ops.pack_signs(x, block_size=self.block_size, residual=residual)

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`."""
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
