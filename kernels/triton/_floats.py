"""Float conversions with the same bits in the interpreter, on the GPU and in C++."""

import triton
import triton.language as tl


@triton.jit
def round_to(values, dtype: tl.constexpr):
    """Round fp32 values to another dtype, to nearest, ties to even.

    Triton's interpreter truncates to bf16, so bf16 is rounded here with integers.
    """
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        halves = tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16)
        return halves.to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


@triton.jit
def to_fp32(values):
    """Convert values of a float dtype to fp32, exactly.

    Triton's interpreter is wrong on denormals of bf16, so bf16 is widened here with integers.
    """
    if values.dtype == tl.bfloat16:
        bits = values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return values.to(tl.float32)
