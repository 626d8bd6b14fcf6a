"""``quantize_difference_`` in Triton, compiled: few registers, no spills, wide accesses."""

from pyparallel.kernels import quantize_difference
from pyparallel.kernels._formats import FORMATS, launch_shape
from tests.kernels.inspect_triton import Compilation


def encoding(kind, z, *, ratio="fp32", stochastic=True, block_size=256, numel="i32"):
    bits, mantissa, largest = FORMATS[kind]
    codes = "*i8" if kind == (8, "int") else "*u8"
    buffers = {"z": z, "replica": z, "offset": "*i64", "codes": codes, "scales": "*fp32"}
    shape = launch_shape(block_size)
    return Compilation(
        kernel="_quantize_difference_kernel",
        module="quantize_difference",
        signature={**buffers, "ratio": ratio, "seed": "i64", "numel": numel},
        constants={
            "STOCHASTIC": stochastic,
            "LARGEST": largest,
            "BITS": bits,
            "MANTISSA": mantissa,
            "BLOCK_SIZE": block_size,
            "BLOCK": shape["BLOCK"],
        },
        options={**quantize_difference.OPTIONS, "num_warps": shape["num_warps"]},
        # Four elements of 16 bits are only eight bytes.
        reads=("z", "replica") if z == "*fp32" else (),
        writes=("z", "replica") if z == "*fp32" else (),
    )


COMPILATIONS = [
    encoding((8, "int"), "*fp32"),
    encoding((8, "int"), "*bf16", stochastic=False, numel="i64"),
    encoding((4, "int"), "*fp32", ratio="*fp32", block_size=4096),
    encoding((8, "e4m3"), "*fp32", block_size=32),
    encoding((8, "e5m2"), "*fp32", stochastic=False, numel="i64"),
]
