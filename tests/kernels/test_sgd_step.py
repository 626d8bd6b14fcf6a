"""``sgd_step_`` in Triton, compiled: few registers, no spills, 16 bytes of fp32 at a time."""

from typing import Any

from pyparallel.kernels import sgd_step
from tests.kernels.inspect_triton import Compilation
from tests.kernels.steps import launch, launches


def step(*types: Any, **options: Any) -> Compilation:
    return launch(
        sgd_step,
        ("momentum_buffer",),
        types,
        floats=("momentum", "share"),
        scalars=("decay", "rate", "ahead_rate"),
        flags={"NESTEROV": 1},
        **options,
    )


def clear(dtype: str) -> Compilation:
    return Compilation(
        "_clear_nonfinite_kernel",
        "sgd_step",
        {"like": dtype, "table": "*i64", "found": "*u8"},
        {"PART": sgd_step.PART},
    )


COMPILATIONS = [*launches(step, narrow=None), clear("*fp32"), clear("*bf16"), clear("*fp16")]
