"""Eight or four bits an entry, with a scale per block of neighbors."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import ops
from ..ops._blocks import check_block_size
from .block_coder import BlockCoder
from .compressor import Message, check_served
from .corruption import refusing_corrupt
from .layout import Layout
from .state import State


@dataclass(frozen=True)
class Quantizer(BlockCoder):
    """What ``ops.quantize`` does, as a compressor; see there for what it makes of nan and inf.

    Args:
        block_size: entries that share a scale, a power of two from 32 to 4096.
        seed: round stochastically, which is unbiased, with draws of this seed; None: to nearest.
    """

    block_size: int = 256
    seed: int | None = None

    bits: ClassVar[int]
    format: ClassVar[str]

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
        return (numel * self.bits + 7) // 8, -(-numel // self.block_size)

    def compress(self, x: Tensor, state: State, residual: Tensor | None = None) -> Message:
        """As `Compressor.compress`: (codes, scales)."""
        check_served(x, state.layout)
        state.step += 1
        return ops.quantize(
            x,
            bits=self.bits,
            format=self.format,
            block_size=self.block_size,
            residual=residual,
            seed=None if self.seed is None else state.seed(self.seed),
            offset=state.step,
        )

    def decompress(
        self, message: Message, layout: Layout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`."""
        codes, scales = message
        with refusing_corrupt():
            return ops.dequantize(
                codes,
                scales,
                bits=self.bits,
                format=self.format,
                block_size=self.block_size,
                numel=out.numel(),
                out=out,
                accumulate=accumulate,
            )


class Int8(Quantizer):
    """Whole numbers from -127 to 127 times a scale: a quarter of float32's bytes."""

    bits = 8
    format = "int"
