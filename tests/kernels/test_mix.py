"""``mix_`` in Triton, compiled: few registers, no spills, 16 bytes at a time."""

from dataclasses import replace

import pytest

from pyparallel.kernels import mix
from tests.kernels.inspect_triton import Compilation, find_problems_of

DOUBLES = {"weight": "*fp64", "masses": "*fp64"}


def average(z: str, messages: tuple[str, ...], numel: str = "i32") -> Compilation:
    return Compilation(
        kernel="_mix_kernel",
        module="mix",
        signature={"z": z, "messages": messages, "numel": numel, **DOUBLES},
        constants={"NUM_MESSAGES": len(messages), "BLOCK": mix.BLOCK},
        options=mix.OPTIONS,
        reads=("z", "messages"),
        writes=("z",),
    )


COMPILATIONS = [
    average("*fp32", ("*fp32",)),
    average("*fp32", ("*fp32", "*fp32"), numel="i64"),
    average("*fp32", ("*bf16", "*bf16")),
    average("*bf16", ("*bf16",)),
    average("*bf16", ("*fp32", "*fp32"), numel="i64"),
    average("*fp16", ("*fp16", "*fp16")),
    Compilation("_add_masses_kernel", "mix", DOUBLES, {"NUM_MESSAGES": 2}),
]


def test_every_kernel_is_compiled_here():
    kernels = {name for name in vars(mix) if name.endswith("_kernel")}
    assert kernels == {compilation.kernel for compilation in COMPILATIONS}


@pytest.mark.slow  # it compiles
def test_the_inspection_finds_bad_kernels():
    good = average("*fp32", ("*bf16", "*bf16"))
    unaligned, few_threads = replace(good, aligned=False), replace(good, options={"num_warps": 2})
    problems = "\n".join(find_problems_of((each, "sm_90") for each in (unaligned, few_threads)))
    assert "0 of the 64 bytes a thread loads move 16 at a time" in problems
    assert "0 of the 32 bytes a thread stores move 16 at a time" in problems
    assert "registers, more than 64" in problems
