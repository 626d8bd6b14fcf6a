"""``pack_signs`` and ``unpack_signs`` in Triton, for GPUs without the compiled CUDA library."""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ._floats import round_to
from ._register import register

BLOCK = 4096  # elements per program: a block of the largest size, or several smaller ones
PARTIAL_SUMS = 256
# By default the compiler uses too many registers for two resident blocks; AMD's has no such option.
PACK_OPTIONS = {"enable_fp_fusion": False} | ({} if torch.version.hip else {"maxnreg": 64})
UNPACK_OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}


def choose_num_warps(*dtypes: torch.dtype) -> int:
    """Return pack_signs's number of warps: a thread processes 16 bytes of the widest buffer."""
    return BLOCK * max(dtype.itemsize for dtype in dtypes) // (16 * 32)


@triton.jit
def _add_halves(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    halves = tl.reshape(values, (ROWS, 2, WIDTH // 2))
    front, back = tl.split(tl.permute(halves, (0, 2, 1)))
    return front + back


@triton.jit
def _add_pairs(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    even, odd = tl.split(tl.reshape(values, (ROWS, WIDTH // 2, 2)))
    return even + odd


# In the order of all implementations: see csrc/pack_signs.h.
@triton.jit
def _add_up(partial, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    sums = _add_pairs(partial, ROWS, WIDTH)
    sums = _add_pairs(sums, ROWS, WIDTH // 2)
    sums = _add_pairs(sums, ROWS, WIDTH // 4)
    if WIDTH >= 256:
        sums = _add_halves(sums, ROWS, 32)
    if WIDTH >= 128:
        sums = _add_halves(sums, ROWS, 16)
    if WIDTH >= 64:
        sums = _add_halves(sums, ROWS, 8)
    sums = _add_halves(sums, ROWS, 4)
    return tl.reshape(_add_halves(sums, ROWS, 2), (ROWS,))


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)


@triton.jit
def _load_sum(x, residual, offsets, mask, HAS_RESIDUAL: tl.constexpr):
    values = _load(x + offsets, mask).to(tl.float32)
    if HAS_RESIDUAL:
        values += _load(residual + offsets, mask).to(tl.float32)
    return values


# Chunks are added in sequence: a reduction whose other terms are zeros has only one order.
@triton.jit
def _add_chunks(values, ROWS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    chunks = tl.reshape(tl.abs(values), (ROWS, CHUNKS, WIDTH))
    index = tl.arange(0, CHUNKS)[None, :, None]
    partial = tl.zeros((ROWS, WIDTH), tl.float32)
    for c in tl.static_range(CHUNKS):
        partial += tl.sum(tl.where(index == c, chunks, 0.0), axis=1)
    return partial


@triton.jit
def _repeat(values, ROWS: tl.constexpr, TIMES: tl.constexpr):
    return tl.reshape(tl.broadcast_to(values[:, None], (ROWS, TIMES)), (ROWS * TIMES,))


# Packs `count` elements, all of them if the block is WHOLE; the pointers are those of the block.
@triton.jit
def _pack_block(
    x,
    residual,
    count,
    words,
    scales,
    WHOLE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK // BLOCK_SIZE
    offsets = tl.arange(0, BLOCK)
    present = None if WHOLE else offsets < count
    values = _load_sum(x, residual, offsets, present, HAS_RESIDUAL)

    is_set = values >= 0 if WHOLE else (values >= 0) & present
    bits = tl.reshape(is_set.to(tl.int32), (BLOCK // 8, 8))
    word = tl.sum(bits << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)
    places = tl.arange(0, BLOCK // 8)
    tl.store(words + places, word, mask=None if WHOLE else places < (count + 7) // 8)

    sums = _add_up(_add_chunks(values, ROWS, BLOCK_SIZE // WIDTH, WIDTH), ROWS, WIDTH)
    is_finite = sums < float("inf")
    rows = tl.arange(0, ROWS)
    counts = tl.minimum(count - rows * BLOCK_SIZE, BLOCK_SIZE)
    means = tl.div_rn(sums, counts.to(tl.float32))
    live_scales = tl.where(means < 2.0**-100, 0.0, means)
    tl.store(
        scales + rows,
        tl.where(is_finite, live_scales, float("nan")),
        mask=None if WHOLE else counts > 0,
    )
    if HAS_RESIDUAL:
        scale = _repeat(live_scales, ROWS, BLOCK_SIZE)
        keeps = _repeat(is_finite.to(tl.int32), ROWS, BLOCK_SIZE) == 1
        # Read again, which is cheaper than keeping them in registers.
        values = _load_sum(x, residual, offsets, present, HAS_RESIDUAL)
        rest = round_to(values - tl.where(values >= 0, scale, -scale), residual.dtype.element_ty)
        # Selecting instead of masking keeps the stores of full blocks 16 bytes wide.
        old = _load(residual + offsets, present)
        tl.store(residual + offsets, tl.where(keeps, rest, old), mask=present)


@triton.jit
def _pack_signs_kernel(
    x,
    residual,
    numel,
    words,
    scales,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    x += begin
    if HAS_RESIDUAL:
        residual += begin
    words += begin // 8
    scales += begin // BLOCK_SIZE
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _pack_block(x, residual, BLOCK, words, scales, True, BLOCK_SIZE, BLOCK, WIDTH, HAS_RESIDUAL)
    else:
        count = (numel - begin).to(tl.int32)
        _pack_block(
            x, residual, count, words, scales, False, BLOCK_SIZE, BLOCK, WIDTH, HAS_RESIDUAL
        )


@triton.jit
def _unpack_block(
    words,
    scales,
    out,
    count,
    corrupt,
    WHOLE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    offsets = tl.arange(0, BLOCK)
    present = None if WHOLE else offsets < count
    places = tl.arange(0, BLOCK // 8)
    word = _load(words + places, None if WHOLE else places < (count + 7) // 8)
    bits = (word.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1
    bits = tl.reshape(bits, (BLOCK,))
    scale = _load(scales + offsets // BLOCK_SIZE, present)
    is_corrupt = (scale < 0) | (scale == float("inf"))
    num_corrupt = tl.sum(is_corrupt.to(tl.int32), axis=0)
    tl.atomic_add(corrupt, num_corrupt.to(tl.int64), mask=num_corrupt > 0)
    values = tl.where(bits == 1, scale, -scale)
    if ACCUMULATE:
        old = _load(out + offsets, present).to(tl.float32)
        values = tl.where(is_corrupt, old, old + values)
    else:
        values = tl.where(is_corrupt, 0.0, values)
    tl.store(out + offsets, round_to(values, out.dtype.element_ty), mask=present)


@triton.jit
def _unpack_signs_kernel(
    words,
    scales,
    out,
    numel,
    corrupt,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    words += begin // 8
    scales += begin // BLOCK_SIZE
    out += begin
    if begin + BLOCK <= numel:
        _unpack_block(words, scales, out, BLOCK, corrupt, True, BLOCK_SIZE, BLOCK, ACCUMULATE)
    else:
        count = (numel - begin).to(tl.int32)
        _unpack_block(words, scales, out, count, corrupt, False, BLOCK_SIZE, BLOCK, ACCUMULATE)


def pack_signs(
    x: Tensor, block_size: int, residual: Tensor | None, words: Tensor, scales: Tensor
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.pack_signs``."""
    if x.numel() == 0:
        return
    with torch.cuda.device_of(x):
        _pack_signs_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x,
            residual,
            x.numel(),
            words,
            scales,
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
            WIDTH=min(block_size, PARTIAL_SUMS),
            HAS_RESIDUAL=residual is not None,
            num_warps=choose_num_warps(x.dtype, x.dtype if residual is None else residual.dtype),
            **PACK_OPTIONS,
        )


def unpack_signs(
    words: Tensor, scales: Tensor, block_size: int, accumulate: bool, out: Tensor, corrupt: Tensor
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.unpack_signs``."""
    if out.numel() == 0:
        return
    with torch.cuda.device_of(out):
        _unpack_signs_kernel[(triton.cdiv(out.numel(), BLOCK),)](
            words,
            scales,
            out,
            out.numel(),
            corrupt,
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
            ACCUMULATE=accumulate,
            **UNPACK_OPTIONS,
        )


register("pack_signs", pack_signs)
register("unpack_signs", unpack_signs)
