"""Casts to 16-bit floats."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...ops._checks import check_flat
from ..compressor import Message
from ..corrupt_messages import refusing_corrupt
from ..layout import BufferLayout
from ..residual import add_residual, update_residual
from ..state import CompressorState
from .blockwise import BlockwiseCompressor


@dataclass(frozen=True)
class Cast(BlockwiseCompressor):
    """Casts to bfloat16, with float32's range, or float16, with more digits; rounds to nearest.

    Sums are computed in float32, unlike in an all-reduce of 16-bit numbers.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``. Magnitudes above float16's 65504 become inf
            on all ranks.
    """

    dtype: torch.dtype = torch.bfloat16
    granularity = 1

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {self.dtype!r}")

    @override
    def sizes(self, numel: int) -> tuple[int, ...]:
        return (numel,)

    @override
    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """Return ((numel,) of the dtype,)."""
        state.begin_message(x)
        total = add_residual(x, residual)
        message = total.to(self.dtype, copy=True)
        if residual is not None:
            update_residual(residual, total, message)
        return (message,)

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        with refusing_corrupt():
            (values,) = message
            check_flat("values", values, self.dtype, out.numel(), out.device)
        return out.add_(values) if accumulate else out.copy_(values)
