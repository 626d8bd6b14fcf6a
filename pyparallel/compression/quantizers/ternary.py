"""Ternary compression: two bits per entry and a scale per block."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ...ops._checks import check_block_size, check_flat
from ..compressor import Message
from ..corrupt_messages import refusing_corrupt
from ..draws import uniform
from ..layout import BufferLayout
from ..residual import add_residual, update_residual
from ..state import CompressorState
from .blockwise import BlockwiseCompressor

_PER_BYTE = 4
_LOW_BITS = 0b01010101
_CORRUPT = "codes and scales must be made by Ternary, got a corrupt message"


@dataclass(frozen=True, kw_only=True)
class Ternary(BlockwiseCompressor):
    """-1, 0 or 1 times a scale (TernGrad, Wen et al., NeurIPS 2017, arXiv 1705.07878).

    The scale is the block's largest magnitude, and an entry is sent with probability ``|entry| /
    scale``, which is unbiased. A block with an inf or a nan decodes to nan everywhere and keeps its
    old residual.

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
        return -(-numel // _PER_BYTE), -(-numel // self.block_size)

    @override
    def compress(
        self, x: Tensor, state: CompressorState, residual: Tensor | None = None
    ) -> Message:
        """Return (codes, scales).

        Codes are uint8: entry i is bits ``2 * (i % 4)`` and the next of byte ``i // 4``: 0, 1, or 2
        for -1; 0 after the last entry. Scales are float32.
        """
        state.begin_message(x)
        total = add_residual(x, residual)
        blocks = _split(total, self.block_size)
        magnitudes = blocks.abs()
        scales = magnitudes.amax(dim=1)
        is_finite = scales < torch.inf  # false for nan too
        draws = uniform(blocks.shape, state, self.seed, x.device)
        is_sent = draws < magnitudes / scales[:, None]  # never in a block of zeros
        if residual is not None:
            counts = is_sent.sum(dim=1).clamp(min=1)
            scales = (magnitudes / counts[:, None]).where(is_sent, 0).sum(dim=1)
        scales = torch.where(is_finite, scales, torch.nan)
        codes = torch.where(is_sent & is_finite[:, None], 1 + blocks.signbit().byte(), 0)
        packed = _pack(codes.view(-1))[: self.sizes(x.numel())[0]]
        if residual is not None:
            update_residual(residual, total, _decode(packed, scales, self.block_size, x.numel()))
        return packed, scales

    @override
    def decompress(
        self, message: Message, layout: BufferLayout, out: Tensor, *, accumulate: bool = False
    ) -> Tensor:
        with refusing_corrupt():
            codes, scales = message
            num_codes, num_scales = self.sizes(out.numel())
            check_flat("codes", codes, torch.uint8, num_codes, out.device)
            check_flat("scales", scales, torch.float32, num_scales, out.device)
            has_fourth = (codes & (codes >> 1) & _LOW_BITS != 0).any()
            is_corrupt = has_fourth | ((scales < 0) | scales.isinf()).any()
            torch._assert_async(~is_corrupt, _CORRUPT)
        values = _decode(codes, scales, self.block_size, out.numel())
        return out.add_(values) if accumulate else out.copy_(values)


def _split(flat: Tensor, block_size: int) -> Tensor:
    """Return (blocks, block_size), zero-padded."""
    padding = -flat.numel() % block_size
    return torch.nn.functional.pad(flat, (0, padding)).view(-1, block_size)


def _decode(packed: Tensor, scales: Tensor, block_size: int, numel: int) -> Tensor:
    blocks = _split(_unpack(packed)[:numel], block_size)
    signs = (blocks & 1).float() - (blocks >> 1)
    return (signs * scales[:, None]).view(-1)[:numel]


def _pack(codes: Tensor) -> Tensor:
    """Pack four codes per byte; their number is a multiple of four."""
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    return (codes.view(-1, _PER_BYTE) << places).sum(dim=1, dtype=torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 3).flatten()
