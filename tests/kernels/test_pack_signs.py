"""``pack_signs`` and its inverse in Triton, compiled: few registers, no spills, wide accesses."""

import torch

from pyparallel.kernels import pack_signs
from tests.kernels.inspect_triton import Compilation


def pack(x: str, residual: str, block_size: int = 1024, numel: str = "i32") -> Compilation:
    dtypes = {kind: torch.float32 if kind == "*fp32" else torch.bfloat16 for kind in (x, residual)}
    num_warps = pack_signs.choose_num_warps(*dtypes.values())
    # A thread moves 16 bytes of the widest buffer, and fewer of a narrower one.
    widest = max(dtypes.values(), key=lambda dtype: dtype.itemsize)
    buffers = {"x": dtypes[x], "residual": dtypes[residual]}
    wide = [name for name, dtype in buffers.items() if dtype == widest]
    return Compilation(
        kernel="_pack_signs_kernel",
        module="pack_signs",
        signature={"x": x, "residual": residual, "numel": numel, "words": "*u8", "scales": "*fp32"},
        constants={
            "BLOCK_SIZE": block_size,
            "BLOCK": pack_signs.BLOCK,
            "WIDTH": min(block_size, pack_signs.PARTIAL_SUMS),
            "HAS_RESIDUAL": True,
        },
        options={**pack_signs.PACK_OPTIONS, "num_warps": num_warps},
        reads=tuple(wide),
        writes=("residual",) if "residual" in wide else (),
    )


def unpack(out: str, accumulate: bool, numel: str = "i32") -> Compilation:
    return Compilation(
        kernel="_unpack_signs_kernel",
        module="pack_signs",
        signature={
            "words": "*u8",
            "scales": "*fp32",
            "out": out,
            "numel": numel,
            "corrupt": "*i64",
        },
        constants={"BLOCK_SIZE": 1024, "BLOCK": pack_signs.BLOCK, "ACCUMULATE": accumulate},
        options=pack_signs.UNPACK_OPTIONS,
        reads=("out",) if accumulate else (),
        writes=("out",),
    )


COMPILATIONS = [
    pack("*fp32", "*fp32"),
    pack("*bf16", "*fp32", numel="i64"),
    pack("*bf16", "*bf16"),
    pack("*fp32", "*fp32", block_size=32),
    pack("*fp32", "*fp32", block_size=4096),
    unpack("*fp32", accumulate=False),
    unpack("*fp32", accumulate=True, numel="i64"),
    unpack("*bf16", accumulate=True),
]
