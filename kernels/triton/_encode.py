"""Encoding of a block of fp32 values as codes and scales."""

import triton
import triton.language as tl

from ._formats import encode, spread, store_codes
from ._philox import random_bits


@triton.jit
def load_values(source, offsets, numel, MASKED: tl.constexpr):
    """Load a buffer's elements as fp32; zeros past the end."""
    if MASKED:
        return tl.load(source + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
    return tl.load(source + offsets).to(tl.float32)


@triton.jit
def encode_block(
    values,
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
    FITS_SCALE: tl.constexpr = False,
):
    """Store codes and scales; return what they decode to, and of which the errors are kept."""
    random = random_bits(begin, seed, tl.load(offset), BLOCK) if STOCHASTIC else None
    if MANTISSA < 0:
        code, number = encode(values, random, LARGEST, BITS, MANTISSA)
        store_codes(codes, begin, code, numel, MASKED, BITS)
        return number, tl.abs(values - number) < float("inf")

    COUNT: tl.constexpr = BLOCK // BLOCK_SIZE
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.reshape(magnitudes, (COUNT, BLOCK_SIZE)), axis=1)
    absmax = largest.to(tl.float32, bitcast=True)
    is_finite = largest < 0x7F800000
    is_live = is_finite & (absmax >= 2.0**-100)
    limit = tl.full((COUNT,), LARGEST, tl.float32)
    # Correctly rounded (IEEE): Triton's plain operator is approximate.
    scale = tl.where(is_live, tl.div_rn(absmax, limit), 0.0)
    inverse = tl.where(is_live, tl.div_rn(limit, absmax), 0.0)
    blocks = begin // BLOCK_SIZE + tl.arange(0, COUNT)
    emitted = tl.where(is_finite, scale, float("nan"))
    each = spread(inverse, BLOCK_SIZE)
    scaled = tl.where(each > 0.0, values * each, 0.0)
    code, number = encode(scaled, random, LARGEST, BITS, MANTISSA)
    store_codes(codes, begin, code, numel, MASKED, BITS)
    if FITS_SCALE:
        emitted *= _mean_of_sent(scaled, code, COUNT, BLOCK_SIZE)
    tl.store(scales + blocks, emitted, mask=blocks * BLOCK_SIZE < numel)
    return number * spread(emitted, BLOCK_SIZE), spread(is_finite, BLOCK_SIZE)


# In multiples of 2**-18, whose sum is exact in any order: see csrc/quantize.h.
@triton.jit
def _mean_of_sent(scaled, code, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    units = (tl.abs(scaled) * 2.0**18 + 2.0**23).to(tl.int32, bitcast=True) & 0x7FFFFF
    units = tl.sum(tl.reshape(tl.where(code > 0, units, 0), (COUNT, BLOCK_SIZE)), axis=1)
    counts = tl.sum(tl.reshape((code > 0).to(tl.int32), (COUNT, BLOCK_SIZE)), axis=1)
    mean = tl.div_rn(units.to(tl.float32), tl.maximum(counts, 1).to(tl.float32))
    return mean * 2.0**-18
