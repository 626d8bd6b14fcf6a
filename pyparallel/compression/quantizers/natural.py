"""Natural compression: a sign and a power of two per entry."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ... import ops
from ..compressor import Message
from ..corrupt_messages import refusing_corrupt
from ..layout import BufferLayout
from ..residual import Residual
from ..state import CompressorState
from .blockwise import BlockwiseCompressor


@dataclass(frozen=True, kw_only=True)
class Natural(BlockwiseCompressor):
    """Stochastic rounding to the two nearest powers of two (Horvath et al., arXiv 1905.10988).

    It is unbiased; the variance is at most an eighth of the entry's square. A byte per entry: its
    sign, and 2**-80 to 2**44, 0, inf or nan. An entry below 2**-80 is rounded stochastically to
    that or 0. One above 2**44 (1.7e13) becomes inf; like inf and nan, which are sent as they are,
    it leaves the residual unchanged.
    """

    seed: int = 0
    unbiased = True  # for entries up to 2**44
    granularity = 1

    @override
    def sizes(self, numel: int) -> tuple[int, ...]:
        return (numel,)

    @override
    def compress(self, x: Tensor, state: CompressorState, residual: Residual = None) -> Message:
        """Return ((numel,) uint8 codes,), as ``ops.quantize`` documents them."""
        state.begin_message(x)
        seed = state.seed(self.seed)
        codes, _ = ops.quantize(
            x, format="natural", residual=residual, seed=seed, offset=state.step
        )
        return (codes,)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        with refusing_corrupt():
            (codes,) = message
            no_scales = torch.empty(0, dtype=torch.float32, device=codes.device)
            return ops.dequantize(
                codes,
                no_scales,
                bits=8,
                format="natural",
                numel=out.numel(),
                out=out,
                accumulate=accumulate,
            )
