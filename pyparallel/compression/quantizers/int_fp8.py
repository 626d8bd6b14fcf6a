"""Eight or four bits an entry, with a scale per block of neighbors."""

import abc
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ... import ops
from ...ops._checks import check_block_size
from ..compressor import Message, check_buffer
from ..layout import BufferLayout
from ..state import CompressorState
from ..validation import refusing_corrupt
from .blockwise import BlockwiseCompressor


class Code(NamedTuple):
    """What ``ops.quantize`` calls the numbers that scaled entries are rounded to."""

    bits: int
    format: str


@dataclass(frozen=True, kw_only=True)
class Quantizer(BlockwiseCompressor):
    """What ``ops.quantize`` does, as a compressor; see there for what it makes of nan and inf.

    Args:
        block_size: entries that share a scale, a power of two from 32 to 4096.
        seed: round stochastically, which is unbiased, with draws of this seed; None: to nearest.
    """

    block_size: int = 256
    seed: int | None = None

    @property
    @abc.abstractmethod
    def code(self) -> Code:
        """What scaled entries are rounded to."""

    def __post_init__(self) -> None:
        check_block_size(self.block_size)

    @property
    def granularity(self) -> int:
        """A block."""
        return self.block_size

    @property
    def unbiased(self) -> bool:
        """Where rounding is stochastic."""
        return self.seed is not None

    def sizes(self, numel: int) -> tuple[int, ...]:
        """Codes, and a scale per block."""
        return (numel * self.code.bits + 7) // 8, -(-numel // self.block_size)

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`: (codes, scales)."""
        check_buffer(x, state.layout)
        state.step += 1
        return ops.quantize(
            x,
            **self.code._asdict(),
            block_size=self.block_size,
            residual=residual,
            seed=None if self.seed is None else state.seed(self.seed),
            offset=state.step,
        )

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`."""
        with refusing_corrupt():
            codes, scales = message
            return ops.dequantize(
                codes,
                scales,
                **self.code._asdict(),
                block_size=self.block_size,
                numel=out.numel(),
                out=out,
                accumulate=accumulate,
            )


class IntQuantizer(Quantizer):
    """Whole numbers times a scale, as many above 0 as below."""

    def contraction(self, layout: BufferLayout) -> float | None:
        """Of a block of n entries and numbers to L, with m = (n - 1) / (2 L)**2.

        The largest entry is exact. Another errs by at most half a number, and to nearest by no more
        than itself, so at worst all others lie at half a number: 1 / (1 + m). At random, the
        expected square is at most a quarter: 1 - m, where that is positive.

        A block whose magnitudes are all below 2**-100 is sent as 0: float32 knows no such squares.
        """
        largest = (1 << self.code.bits - 1) - 1
        neighbors = max(0, min(layout.numel, self.block_size) - 1)
        loss = neighbors / (2 * largest) ** 2
        if self.unbiased:
            return 1 - loss if loss < 1 else None
        return 1 / (1 + loss)


class Int8(IntQuantizer):
    """Whole numbers from -127 to 127 times a scale: a quarter of float32's bytes."""

    @property
    def code(self) -> Code:
        """Of a byte."""
        return Code(8, "int")


class Int4(IntQuantizer):
    """Whole numbers from -7 to 7 times a scale, two to a byte: an eighth of float32's bytes."""

    @property
    def code(self) -> Code:
        """Of half a byte."""
        return Code(4, "int")


@dataclass(frozen=True)
class Fp8(Quantizer):
    """Floats of 8 bits times a scale: a quarter of float32's bytes (arXiv 2209.05433).

    Small entries of a block keep more digits than as whole numbers, large ones fewer.

    Args:
        format: "e4m3", with 4 binary digits over 18 powers of two, or "e5m2", with 3 over 32.
    """

    format: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in _DIGITS:
            raise ValueError(f"format must be one of {', '.join(_DIGITS)}, got {self.format!r}")

    @property
    def code(self) -> Code:
        """Of a byte."""
        return Code(8, self.format)

    def contraction(self, layout: BufferLayout) -> float | None:
        """Of d digits: an entry errs by at most 2**-d of itself, at random on average.

        Twice the square has room for the smaller entries of a block, which have fewer digits. A
        block whose magnitudes are all below 2**-100 is sent as 0: float32 knows no such squares.
        """
        return 1 - 2 * 4.0 ** -_DIGITS[self.format]


_DIGITS = {"e4m3": 4, "e5m2": 3}
