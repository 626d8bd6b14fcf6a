"""The formats of quantized messages, as in ``csrc/quantize.h``.

A format is its BITS and its MANTISSA bits, 0 for integers and -1 for powers of two without scales.
Codes are int32 here, zeros above them.
"""

import triton
import triton.language as tl

# bits and format of an op: BITS, MANTISSA, the largest number.
FORMATS = {
    (8, "int"): (8, 0, 127.0),
    (4, "int"): (4, 0, 7.0),
    (8, "e4m3"): (8, 3, 448.0),
    (8, "e5m2"): (8, 2, 57344.0),
    (2, "ternary"): (2, 0, 1.0),
    (8, "natural"): (8, -1, 2.0**44),
}

_NO_FRACTION = tl.constexpr(1.5 * 2**23)  # added to magnitudes below 2**22: no bits for a fraction


@triton.jit
def _fraction(random):
    return (random.to(tl.float32) + 0.5) * (1.0 / 65536)


@triton.jit
def _encode_integer(scaled, random, LARGEST: tl.constexpr, BITS: tl.constexpr):
    if random is None:
        whole = (scaled + _NO_FRACTION) - _NO_FRACTION
    else:
        whole = tl.floor(scaled + _fraction(random))
    number = tl.minimum(tl.maximum(whole, -LARGEST), LARGEST)
    return number.to(tl.int32) & ((1 << BITS) - 1), number


@triton.jit
def _encode_ternary(scaled, random):
    threshold = 0.5 if random is None else _fraction(random)
    sent = 1 + (scaled.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    code = tl.where(tl.abs(scaled) > threshold, sent, 0)
    return code, _decode_ternary(code)


@triton.jit
def _decode_ternary(code):
    return ((code & 1) - (code >> 1)).to(tl.float32)


@triton.jit
def _encode_natural(value, random):
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits &= 0x7FFFFFFF
    magnitude = tl.abs(value)
    if random is None:
        rounded = bits + (1 << 22) - 1 + ((bits >> 23) & 1)
        threshold = 0.5
    else:
        rounded = bits + (random << 7) + 64
        threshold = _fraction(random)
    small = (magnitude > threshold * 2.0**-80).to(tl.int32)
    code = tl.where(magnitude < 2.0**-80, small, (rounded >> 23) - 46)
    code = tl.where(bits > (171 << 23), 126, code)  # above 2**44
    code = tl.where(code == 0, 0, code | sign)
    code = tl.where(bits > 0x7F800000, 127, code)
    return code, _decode_natural(code)


@triton.jit
def _decode_natural(code):
    magnitude = code & 0x7F
    bits = tl.where(magnitude == 0, 0, (magnitude + 46) << 23)
    bits = tl.where(magnitude == 126, 0x7F800000, bits)
    bits = tl.where(magnitude == 127, 0x7FC00000, bits)
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_float(scaled, random, LARGEST: tl.constexpr, MANTISSA: tl.constexpr):
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    DROPPED: tl.constexpr = 23 - MANTISSA
    magnitude = tl.minimum(tl.abs(scaled), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    subnormal = magnitude * (2.0 ** (BIAS - 1 + MANTISSA))
    if random is None:
        bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    else:
        bits += (random << (DROPPED - 16)) + (1 << (DROPPED - 17))
        subnormal = tl.floor(subnormal + _fraction(random))
    normal = (bits >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Subnormals are rounded as multiples of the smallest; the one past the last is normal.
    count = (subnormal + (2.0**23)).to(tl.int32, bitcast=True) & ((2 << MANTISSA) - 1)
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), count, normal)
    code |= (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    return code, _decode_float(code, MANTISSA)


@triton.jit
def _decode_float(code, MANTISSA: tl.constexpr):
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    shifted = (code & 0x7F) << (23 - MANTISSA)
    normal = (shifted + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    subnormal = (shifted + ((128 - BIAS) << 23)).to(tl.float32, bitcast=True) - 2.0 ** (1 - BIAS)
    is_normal = (code & 0x7F) >= (1 << MANTISSA)
    magnitude = tl.where(is_normal, normal, subnormal)
    signed = magnitude.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def encode(scaled, random, LARGEST: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Return codes and the numbers they decode to; ``random`` is None for the nearest codes."""
    if BITS == 2:
        code, number = _encode_ternary(scaled, random)
    elif MANTISSA < 0:
        code, number = _encode_natural(scaled, random)
    elif MANTISSA == 0:
        code, number = _encode_integer(scaled, random, LARGEST, BITS)
    else:
        code, number = _encode_float(scaled, random, LARGEST, MANTISSA)
    return code, number


@triton.jit
def decode(code, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the numbers that codes decode to, and whether the codes are corrupt."""
    if BITS == 2:
        number = _decode_ternary(code)
        is_corrupt = code == 3
    elif MANTISSA < 0:
        number = _decode_natural(code)
        is_corrupt = (code == 128) | (code == 255)
    elif MANTISSA == 0:
        sign: tl.constexpr = 1 << (BITS - 1)
        number = ((code ^ sign) - sign).to(tl.float32)
        is_corrupt = code == sign
    else:
        number = _decode_float(code, MANTISSA)
        is_corrupt = (code & 0x7F) >= (0x7C if MANTISSA == 2 else 0x7F)
    return number, is_corrupt


@triton.jit
def is_corrupt_scale(scale):
    """Return whether a scale is one that is never emitted."""
    return (scale < 0.0) | (scale == float("inf"))


@triton.jit
def store_codes(codes, begin, code, numel, MASKED: tl.constexpr, BITS: tl.constexpr):
    """Store the codes of a block's elements, from element ``begin`` on, which is a full byte's."""
    if BITS == 2:
        low, high = tl.split(tl.reshape(code, (code.shape[0] // 2, 2)))
        pairs = low | (high << 2)
        low, high = tl.split(tl.reshape(pairs, (code.shape[0] // 4, 2)))
        code = low | (high << 4)
        begin = begin // 4
        numel = numel // 4 + (numel % 4 + 3) // 4
    if BITS == 4:
        low, high = tl.split(tl.reshape(code, (code.shape[0] // 2, 2)))
        code = low | (high << 4)
        begin = begin // 2
        numel = numel // 2 + numel % 2
    offsets = begin + tl.arange(0, code.shape[0])
    mask = offsets < numel if MASKED else None
    tl.store(codes + offsets, code.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def load_codes(codes, begin, numel, MASKED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the codes of a block's elements; zeros past the end."""
    COUNT: tl.constexpr = BLOCK * BITS // 8
    offsets = begin * BITS // 8 + tl.arange(0, COUNT)
    if MASKED:
        # Relative to `begin`: numel * BITS may overflow numel's type.
        rest = (numel - begin).to(tl.int32)
        present = tl.arange(0, COUNT) * (8 // BITS) < rest
        code = tl.load(codes + offsets, mask=present, other=0).to(tl.int32) & 0xFF
    else:
        code = tl.load(codes + offsets).to(tl.int32) & 0xFF
    if BITS == 2:
        code = tl.reshape(tl.join(code & 15, code >> 4), (BLOCK // 2,))
        code = tl.reshape(tl.join(code & 3, code >> 2), (BLOCK,))
    if BITS == 4:
        code = tl.reshape(tl.join(code & 15, code >> 4), (BLOCK,))
    return code


@triton.jit
def spread(blocks, BLOCK_SIZE: tl.constexpr):
    """Repeat a value of each of the message's blocks for all its elements."""
    COUNT: tl.constexpr = blocks.shape[0]
    each = tl.broadcast_to(blocks[:, None], (COUNT, BLOCK_SIZE))
    return tl.reshape(each, (COUNT * BLOCK_SIZE,))


@triton.jit
def load_entries(
    codes,
    scales,
    begin,
    numel,
    MASKED: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a block's decoded entries, and which of the existing ones are corrupt."""
    number, is_corrupt = decode(
        load_codes(codes, begin, numel, MASKED, BITS, BLOCK), BITS, MANTISSA
    )
    if MANTISSA >= 0:
        COUNT: tl.constexpr = BLOCK // BLOCK_SIZE
        blocks = begin // BLOCK_SIZE + tl.arange(0, COUNT)
        if MASKED:
            scale = tl.load(scales + blocks, mask=blocks * BLOCK_SIZE < numel, other=0.0)
        else:
            scale = tl.load(scales + blocks)
        scale = spread(scale, BLOCK_SIZE)
        is_corrupt |= is_corrupt_scale(scale)
        number *= scale
    if MASKED:
        is_corrupt &= begin + tl.arange(0, BLOCK) < numel
    return number, is_corrupt


@triton.jit
def count_corrupt(corrupt, found):
    """Add the number of corrupt elements to the counter on the device."""
    total = tl.sum(found)
    if total > 0:
        tl.atomic_add(corrupt, total.to(tl.int64))
