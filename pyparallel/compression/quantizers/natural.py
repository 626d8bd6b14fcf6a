"""Natural compression: a sign and a power of two per entry."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...ops._checks import check_flat
from ..compressor import Message
from ..corrupt_messages import refusing_corrupt
from ..draws import uniform
from ..layout import BufferLayout
from ..residual import add_residual, update_residual
from ..state import CompressorState
from .blockwise import BlockwiseCompressor

_SMALLEST, _LARGEST = 2.0**-80, 2.0**44
_INFINITY, _NAN = 126, 127  # codes; 0 is 0, and 1 to 125 are powers of two
_SIGN = 128
_MANTISSA = 23  # bits of a float32
_FIRST = 127 - 80  # the biased exponent of code 1
_CORRUPT = "codes must be made by Natural, got a corrupt message"


@dataclass(frozen=True, kw_only=True)
class Natural(BlockwiseCompressor):
    """Stochastic rounding to the two nearest powers of two (Horvath et al., arXiv 1905.10988).

    It is unbiased; the variance is at most an eighth of the entry's square. A byte per entry: its
    sign, and 2**-80 to 2**44, 0, inf or nan. An entry below 2**-80 is rounded stochastically to
    that or 0. One above 2**44 (1.7e13) becomes inf; like inf and nan, which are sent as they are,
    it leaves the residual unchanged.

    Args:
        seed: seed of the random draws.
    """

    seed: int = 0
    unbiased = True  # for entries up to 2**44
    granularity = 1

    @override
    def sizes(self, numel: int) -> tuple[int, ...]:
        return (numel,)

    @override
    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """Return ((numel,) uint8 codes,).

        A code is 128 for a negative entry, plus 0 for 0, 1 to 125 for 2**-80 to 2**44, 126 for inf;
        127 is nan.
        """
        state.begin_message(x)
        total = add_residual(x, residual)
        codes = _encode(total, uniform(total.shape, state, self.seed, x.device))
        if residual is not None:
            update_residual(residual, total, _decode(codes))
        return (codes,)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        with refusing_corrupt():
            (codes,) = message
            check_flat("codes", codes, torch.uint8, out.numel(), out.device)
            is_corrupt = (codes == _SIGN) | (codes == _SIGN + _NAN)  # no code for -0 and -nan
            torch._assert_async(~is_corrupt.any(), _CORRUPT)
        values = _decode(codes)
        return out.add_(values) if accumulate else out.copy_(values)


def _encode(x: Tensor, draws: Tensor) -> Tensor:
    magnitude = x.abs()
    # A carry out of the mantissa plus random bits rounds up to the next power of two.
    random = (draws * 2**_MANTISSA).to(torch.int32)
    exponent = (magnitude.view(torch.int32) + random) >> _MANTISSA
    codes = exponent - (_FIRST - 1)
    is_small = magnitude < _SMALLEST
    codes = torch.where(is_small, (draws * _SMALLEST < magnitude).to(torch.int32), codes)
    codes = torch.where(magnitude > _LARGEST, _INFINITY, codes)
    codes = torch.where(x.signbit() & (codes != 0), codes + _SIGN, codes)
    return torch.where(x.isnan(), _NAN, codes).to(torch.uint8)


def _decode(codes: Tensor) -> Tensor:
    magnitude = codes.to(torch.int32) & _NAN
    bits = (magnitude + (_FIRST - 1)) << _MANTISSA
    values = torch.where(magnitude == 0, 0.0, bits.view(torch.float32))
    values = torch.where(magnitude == _INFINITY, torch.inf, values)
    values = torch.where(magnitude == _NAN, torch.nan, values)
    return torch.where(codes >= _SIGN, -values, values)
