"""``quantize_difference_`` in Triton, for GPUs without the compiled CUDA library."""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ._encode import encode_block, load_values
from ._floats import round_to, to_fp32
from ._formats import FORMATS, launch_shape
from ._register import register
from ._scalars import argument, on_device, read

OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _quantize_difference_block(
    z,
    replica,
    ratio,
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
    mask = offsets < numel if MASKED else None
    own = load_values(z, offsets, numel, MASKED)
    copy = load_values(replica, offsets, numel, MASKED)
    decoded, _ = encode_block(
        own - copy, seed, offset, codes, scales, begin, numel,
        MASKED, STOCHASTIC, LARGEST, BITS, MANTISSA, BLOCK_SIZE, BLOCK,
    )  # fmt: skip
    sums = round_to(copy + decoded, z.dtype.element_ty)
    tl.store(replica + offsets, sums, mask=mask)
    kept = own + (own - to_fp32(sums)) * ratio
    tl.store(z + offsets, round_to(kept, z.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_difference_kernel(
    z,
    replica,
    ratio,
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
    factor = read(ratio)
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _quantize_difference_block(
            z, replica, factor, seed, offset, codes, scales, begin, numel,
            False, STOCHASTIC, LARGEST, BITS, MANTISSA, BLOCK_SIZE, BLOCK,
        )  # fmt: skip
    else:
        _quantize_difference_block(
            z, replica, factor, seed, offset, codes, scales, begin, numel,
            True, STOCHASTIC, LARGEST, BITS, MANTISSA, BLOCK_SIZE, BLOCK,
        )  # fmt: skip


def quantize_difference_(
    z: Tensor,
    replica: Tensor,
    ratio: Tensor,
    bits: int,
    format: str,
    block_size: int,
    seed: int | None,
    offset: Tensor,
    codes: Tensor,
    scales: Tensor,
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.quantize_difference_``."""
    if z.numel() == 0:
        return
    width, mantissa, largest = FORMATS[bits, format]
    shape = launch_shape(block_size)
    # Only for stochastic rounding: a copy from the host cannot be captured in a graph.
    offset = None if seed is None else on_device(offset, z.device)
    with torch.cuda.device_of(z):
        _quantize_difference_kernel[(triton.cdiv(z.numel(), shape["BLOCK"]),)](
            z,
            replica,
            argument(ratio),
            seed or 0,
            offset,
            codes,
            scales,
            z.numel(),
            STOCHASTIC=seed is not None,
            LARGEST=largest,
            BITS=width,
            MANTISSA=mantissa,
            BLOCK_SIZE=block_size,
            **shape,
            **OPTIONS,
        )


register("quantize_difference_", quantize_difference_)
