"""``quantize`` and ``dequantize`` in Triton, compiled: few registers, no spills, wide accesses."""

from pyparallel.kernels import quantize
from pyparallel.kernels._formats import FORMATS, launch_shape
from tests.kernels.inspect_triton import Compilation


def encoding(kind, x, residual=None, *, stochastic=True, block_size=256, numel="i32"):
    bits, mantissa, largest = FORMATS[kind]
    codes = "*i8" if kind == (8, "int") else "*u8"
    pointers = {"x": x, "offset": "*i64", "codes": codes, "scales": "*fp32"}
    if residual:
        pointers["residual"] = residual
    shape = launch_shape(block_size)
    return Compilation(
        kernel="_quantize_kernel",
        module="quantize",
        signature={**pointers, "seed": "i64", "numel": numel},
        constants={
            "STOCHASTIC": stochastic,
            "LARGEST": largest,
            "BITS": bits,
            "MANTISSA": mantissa,
            "BLOCK_SIZE": block_size,
            "BLOCK": shape["BLOCK"],
            **({} if residual else {"residual": None}),
        },
        options={**quantize.OPTIONS, "num_warps": shape["num_warps"]},
        # Four elements of 16 bits are only eight bytes.
        reads=tuple(name for name in ("x", "residual") if pointers.get(name) == "*fp32"),
        writes=("residual",) if residual == "*fp32" else (),
    )


def decoding(kind, out, *, accumulate=False, block_size=256, numel="i32"):
    bits, mantissa, _ = FORMATS[kind]
    codes = "*i8" if kind == (8, "int") else "*u8"
    pointers = {"codes": codes, "scales": "*fp32", "out": out, "corrupt": "*i64"}
    return Compilation(
        kernel="_dequantize_kernel",
        module="quantize",
        signature={**pointers, "numel": numel},
        constants={
            "ACCUMULATE": accumulate,
            "BITS": bits,
            "MANTISSA": mantissa,
            "BLOCK_SIZE": block_size,
            "BLOCK": quantize.DEQUANTIZE_BLOCK,
        },
        options=quantize.DEQUANTIZE_OPTIONS,
        reads=("out",) if accumulate else (),
        writes=("out",),
    )


COMPILATIONS = [
    encoding((8, "int"), "*fp32", "*fp32"),
    encoding((8, "int"), "*bf16", stochastic=False, numel="i64"),
    encoding((4, "int"), "*fp32", "*bf16", block_size=4096),
    encoding((8, "e4m3"), "*fp32", "*fp32", block_size=32),
    encoding((8, "e5m2"), "*fp32", "*fp32", numel="i64"),
    encoding((2, "ternary"), "*fp32", "*fp32", numel="i64"),
    encoding((2, "ternary"), "*bf16", block_size=4096),
    encoding((8, "natural"), "*fp32", "*fp32"),
    decoding((8, "int"), "*fp32"),
    decoding((4, "int"), "*bf16", block_size=32, numel="i64"),
    decoding((8, "e4m3"), "*fp32", accumulate=True),
    decoding((8, "e5m2"), "*bf16", accumulate=True),
    decoding((2, "ternary"), "*fp32", accumulate=True),
    decoding((8, "natural"), "*fp32", accumulate=True),
]
