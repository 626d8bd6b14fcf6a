"""Sixteen bits an entry."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops._checks import check_flat
from ..compressor import Message, check_buffer
from ..layout import BufferLayout
from ..residual import add_residual, update_residual
from ..state import CompressorState
from ..validation import refusing_corrupt
from .blockwise import BlockwiseCompressor


@dataclass(frozen=True)
class Cast(BlockwiseCompressor):
    """Round to nearest in bfloat16, with float32's range, or in float16, with more digits.

    Sums are taken in float32, unlike those of an all-reduce of 16-bit numbers.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``. A magnitude beyond float16's 65504 becomes
            inf, for all to see.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {self.dtype!r}")

    @property
    def unbiased(self) -> bool:
        """No: to nearest."""
        return False

    @property
    def granularity(self) -> int:
        """An entry."""
        return 1

    def contraction(self, layout: BufferLayout) -> float | None:
        """Of bfloat16: an entry's error is at most 2**-9 of it. None of float16: it underflows."""
        return 1 - 2.0**-16 if self.dtype == torch.bfloat16 else None

    def sizes(self, numel: int) -> tuple[int, ...]:
        """One number per entry."""
        return (numel,)

    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """As `Compressor.compress`: (numel,) of the dtype."""
        check_buffer(x, state.layout)
        state.step += 1
        total = add_residual(x, residual)
        message = total.to(self.dtype, copy=True)
        if residual is not None:
            update_residual(residual, total, message)
        return (message,)

    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        """As `Compressor.decompress`."""
        with refusing_corrupt():
            (values,) = message
            check_flat("values", values, self.dtype, out.numel(), out.device)
        return out.add_(values) if accumulate else out.copy_(values)
