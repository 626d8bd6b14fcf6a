"""``mix_quantized_`` in Triton, compiled: few registers, no spills, 16 bytes at a time."""

from pyparallel.kernels import mix_quantized
from pyparallel.kernels._formats import FORMATS, launch_shape
from tests.kernels.inspect_triton import Compilation


def average(kind, z, num_messages, *, replicas=False, block_size=256, numel="i32"):
    bits, mantissa, _ = FORMATS[kind]
    codes = "*i8" if kind == (8, "int") else "*u8"
    messages = {"codes": (codes,) * num_messages, "scales": ("*fp32",) * num_messages}
    if replicas:
        messages["replicas"] = (z,) * num_messages
    counts = {"weight": "*fp64", "masses": "*fp64", "corrupt": "*i64"}
    written = ("z", "replicas") if replicas else ("z",)
    shape = launch_shape(block_size)
    return Compilation(
        kernel="_mix_quantized_kernel",
        module="mix_quantized",
        signature={"z": z, **messages, **counts, "numel": numel},
        constants={
            "NUM_MESSAGES": num_messages,
            "BITS": bits,
            "MANTISSA": mantissa,
            "BLOCK_SIZE": block_size,
            "BLOCK": shape["BLOCK"],
            **({} if replicas else {"replicas": None}),
        },
        options={**mix_quantized.OPTIONS, "num_warps": shape["num_warps"]},
        # Four elements of 16 bits are only eight bytes.
        reads=written if z == "*fp32" else (),
        writes=written if z == "*fp32" else (),
    )


COMPILATIONS = [
    average((8, "int"), "*fp32", 1),
    average((8, "int"), "*fp32", 2, numel="i64"),
    average((4, "int"), "*bf16", 2, block_size=32),
    average((8, "e4m3"), "*fp32", 2, block_size=4096),
    average((8, "e5m2"), "*bf16", 1),
    average((8, "int"), "*fp32", 1, replicas=True),
    average((8, "int"), "*fp32", 2, replicas=True, numel="i64"),
    average((4, "int"), "*bf16", 2, replicas=True),
    average((8, "e4m3"), "*fp32", 2, replicas=True),
]
