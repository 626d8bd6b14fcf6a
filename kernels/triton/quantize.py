"""``quantize`` and ``dequantize`` in Triton, for GPUs without the compiled CUDA library."""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ._encode import encode_block, load_values
from ._floats import round_to
from ._formats import FORMATS, count_corrupt, launch_shape, load_entries
from ._register import register
from ._scalars import on_device

OPTIONS = {"enable_fp_fusion": False}
# dequantize has no reduction, and the state of eight elements per thread fits.
DEQUANTIZE_BLOCK = 4096  # a multiple of every block size of the message
DEQUANTIZE_OPTIONS = {**OPTIONS, "num_warps": 16}


@triton.jit
def _quantize_block(
    x,
    residual,
    seed,
    offset,
    codes,
    scales,
    begin,
    numel,
    MASKED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = begin + tl.arange(0, BLOCK)
    sums = load_values(x, offsets, numel, MASKED)
    if residual is not None:
        lost = load_values(residual, offsets, numel, MASKED)
        sums += lost
    decoded, keeps = encode_block(
        sums, seed, offset, codes, scales, begin, numel,
        MASKED, STOCHASTIC, LARGEST, BITS, MANTISSA, BLOCK_SIZE, BLOCK, residual is not None,
    )  # fmt: skip
    if residual is not None:
        rest = tl.where(keeps, sums - decoded, lost)
        mask = offsets < numel if MASKED else None
        tl.store(residual + offsets, round_to(rest, residual.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_kernel(
    x,
    residual,
    seed,
    offset,
    codes,
    scales,
    numel,
    STOCHASTIC: tl.constexpr,
    LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _quantize_block(
            x, residual, seed, offset, codes, scales, begin, numel,
            False, STOCHASTIC, LARGEST, BITS, MANTISSA, BLOCK_SIZE, BLOCK,
        )  # fmt: skip
    else:
        _quantize_block(
            x, residual, seed, offset, codes, scales, begin, numel,
            True, STOCHASTIC, LARGEST, BITS, MANTISSA, BLOCK_SIZE, BLOCK,
        )  # fmt: skip


@triton.jit
def _dequantize_block(
    codes,
    scales,
    out,
    corrupt,
    begin,
    numel,
    MASKED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entries, is_corrupt = load_entries(
        codes, scales, begin, numel, MASKED, BITS, MANTISSA, BLOCK_SIZE, BLOCK
    )
    offsets = begin + tl.arange(0, BLOCK)
    if ACCUMULATE:
        old = load_values(out, offsets, numel, MASKED)
        result = tl.where(is_corrupt, old, old + entries)
    else:
        result = tl.where(is_corrupt, 0.0, entries)
    mask = offsets < numel if MASKED else None
    tl.store(out + offsets, round_to(result, out.dtype.element_ty), mask=mask)
    count_corrupt(corrupt, is_corrupt.to(tl.int32))


@triton.jit
def _dequantize_kernel(
    codes,
    scales,
    out,
    corrupt,
    numel,
    ACCUMULATE: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    if begin + BLOCK <= numel:
        _dequantize_block(
            codes, scales, out, corrupt, begin, numel,
            False, ACCUMULATE, BITS, MANTISSA, BLOCK_SIZE, BLOCK,
        )  # fmt: skip
    else:
        _dequantize_block(
            codes, scales, out, corrupt, begin, numel,
            True, ACCUMULATE, BITS, MANTISSA, BLOCK_SIZE, BLOCK,
        )  # fmt: skip


def quantize(
    x: Tensor,
    bits: int,
    format: str,
    block_size: int,
    residual: Tensor | None,
    seed: int | None,
    offset: Tensor,
    codes: Tensor,
    scales: Tensor,
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.quantize``."""
    if x.numel() == 0:
        return
    width, mantissa, largest = FORMATS[bits, format]
    shape = launch_shape(block_size)
    # Only for stochastic rounding: a copy from the host cannot be captured in a graph.
    offset = None if seed is None else on_device(offset, x.device)
    with torch.cuda.device_of(x):
        _quantize_kernel[(triton.cdiv(x.numel(), shape["BLOCK"]),)](
            x,
            residual,
            seed or 0,
            offset,
            codes,
            scales,
            x.numel(),
            STOCHASTIC=seed is not None,
            LARGEST=largest,
            BITS=width,
            MANTISSA=mantissa,
            BLOCK_SIZE=block_size,
            **shape,
            **OPTIONS,
        )


def dequantize(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    format: str,
    block_size: int,
    accumulate: bool,
    out: Tensor,
    corrupt: Tensor,
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.dequantize``."""
    if out.numel() == 0:
        return
    width, mantissa, _ = FORMATS[bits, format]
    with torch.cuda.device_of(out):
        _dequantize_kernel[(triton.cdiv(out.numel(), DEQUANTIZE_BLOCK),)](
            codes,
            scales,
            out,
            corrupt,
            out.numel(),
            ACCUMULATE=accumulate,
            BITS=width,
            MANTISSA=mantissa,
            BLOCK_SIZE=block_size,
            BLOCK=DEQUANTIZE_BLOCK,
            **DEQUANTIZE_OPTIONS,
        )


register("quantize", quantize)
register("dequantize", dequantize)
