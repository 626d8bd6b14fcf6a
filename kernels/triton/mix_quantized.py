"""``mix_quantized_`` in Triton, for GPUs without the compiled CUDA library."""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ._floats import round_to, to_fp32
from ._formats import FORMATS, count_corrupt, launch_shape, load_entries
from ._register import register
from .mix import add_message, nothing

MAX_MESSAGES = 16  # per launch: each number is compiled separately
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _mix_block(
    z,
    codes,
    scales,
    replicas,
    corrupt,
    coefficients,
    begin,
    numel,
    MASKED: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < numel if MASKED else None
    own = tl.load(z + offsets, mask=mask).to(tl.float32)
    delta = nothing(own)
    found = tl.zeros((BLOCK,), tl.int32)
    for j in tl.static_range(NUM_MESSAGES):
        entries, is_corrupt = load_entries(
            codes[j], scales[j], begin, numel, MASKED, BITS, MANTISSA, BLOCK_SIZE, BLOCK
        )
        if replicas is None:
            message = tl.where(is_corrupt, own, entries)
        else:
            replica = replicas[j] + offsets
            old = tl.load(replica, mask=mask).to(tl.float32)
            sums = round_to(tl.where(is_corrupt, old, old + entries), z.dtype.element_ty)
            tl.store(replica, sums, mask=mask)
            message = to_fp32(sums)
        delta = add_message(delta, own, message, coefficients[j])
        found += is_corrupt.to(tl.int32)
    tl.store(z + offsets, round_to(own + delta, z.dtype.element_ty), mask=mask)
    count_corrupt(corrupt, found)


@triton.jit
def _mix_quantized_kernel(
    z,
    weight,
    codes,
    scales,
    masses,
    replicas,
    corrupt,
    numel,
    NUM_MESSAGES: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.load(weight)
    for j in tl.static_range(NUM_MESSAGES):
        total += tl.load(masses + j)
    coefficients = ()
    for j in tl.static_range(NUM_MESSAGES):
        coefficients = coefficients + ((tl.load(masses + j) / total).to(tl.float32),)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _mix_block(
            z, codes, scales, replicas, corrupt, coefficients, begin, numel,
            False, NUM_MESSAGES, BITS, MANTISSA, BLOCK_SIZE, BLOCK,
        )  # fmt: skip
    else:
        _mix_block(
            z, codes, scales, replicas, corrupt, coefficients, begin, numel,
            True, NUM_MESSAGES, BITS, MANTISSA, BLOCK_SIZE, BLOCK,
        )  # fmt: skip


# A separate launch: every program of _mix_quantized_kernel reads the old weight.
@triton.jit
def _add_masses_kernel(weight, masses, NUM_MESSAGES: tl.constexpr):
    total = tl.load(weight)
    for j in tl.static_range(NUM_MESSAGES):
        total += tl.load(masses + j)
    tl.store(weight, total)


def mix_quantized_(
    z: Tensor,
    weight: Tensor,
    codes: list[Tensor],
    scales: list[Tensor],
    masses: Tensor,
    bits: int,
    format: str,
    block_size: int,
    replicas: list[Tensor],
    corrupt: Tensor,
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.mix_quantized_``."""
    width, mantissa, _ = FORMATS[bits, format]
    shape = launch_shape(block_size)
    # PushSum is associative: mixing in groups gives the average of all.
    for first in range(0, len(codes), MAX_MESSAGES):
        group = slice(first, first + MAX_MESSAGES)
        count = len(codes[group])
        with torch.cuda.device_of(z):
            if z.numel() > 0:
                _mix_quantized_kernel[(triton.cdiv(z.numel(), shape["BLOCK"]),)](
                    z,
                    weight,
                    tuple(codes[group]),
                    tuple(scales[group]),
                    masses[group],
                    tuple(replicas[group]) if replicas else None,
                    corrupt,
                    z.numel(),
                    NUM_MESSAGES=count,
                    BITS=width,
                    MANTISSA=mantissa,
                    BLOCK_SIZE=block_size,
                    **shape,
                    **OPTIONS,
                )
            _add_masses_kernel[(1,)](weight, masses[group], NUM_MESSAGES=count)


register("mix_quantized_", mix_quantized_)
