"""``adamw_step_`` in Triton, compiled: few registers, no spills, 16 bytes of fp32 at a time."""

from typing import Any

import pytest

from pyparallel.kernels import adamw_step
from tests.kernels.inspect_triton import Compilation, find_problems

READ = ("param", "grad", "exp_avg", "exp_avg_sq", "messages")
WRITTEN = ("param", "exp_avg", "exp_avg_sq", "prediction", "message")


def step(
    param: str,
    grad: str | None,
    moments: str,
    *,
    messages: tuple[str, ...] = (),
    mix_after: bool = False,
    prediction: str | None = None,
    message: str | None = None,
    scaled: bool = False,
    numel: str = "i32",
) -> Compilation:
    buffers = {"param": param, "grad": grad, "exp_avg": moments, "exp_avg_sq": moments}
    buffers |= {"prediction": prediction, "message": message}
    buffers |= {"messages": messages or None}
    states = {"exp_avg", "exp_avg_sq"}
    walked: dict[str, Any] = {name: kind for name, kind in buffers.items() if kind is not None}
    wide = {name for name, kind in walked.items() if "*fp32" in kind}
    # With messages the mass is on the device, and so are the values computed from it; with a
    # GradScaler so are its scalars.
    scalar = "*fp32" if messages else "fp32"
    amp = {"nonfinite": "*fp64", "found_inf": "*fp32"} if scaled else {}
    floats = dict.fromkeys(("pull", "beta2", "share"), "fp32")
    scalars = dict.fromkeys(("decay", "eps", "step_size", "ahead_size"), scalar)
    scalars |= {"factor": "*fp32" if scaled else "fp32"}
    coefficients = {"coefficients": "*fp32"} if messages else {}
    given = {**walked, **amp, **floats, **scalars, **coefficients, "numel": numel}
    optional = (*buffers, "nonfinite", "found_inf", "coefficients")
    absent: dict[str, int | None] = {name: None for name in optional if name not in given}
    flags = {
        "NUM_MESSAGES": len(messages),
        "MIX_AFTER": mix_after,
        "FROM_AVERAGE": 1,
        "DECOUPLED": not scaled,
    }
    return Compilation(
        kernel="_adamw_step_kernel",
        module="adamw_step",
        signature=given,
        constants={**absent, **flags, "BLOCK": adamw_step.BLOCK},
        options=adamw_step.OPTIONS,
        reads=tuple(name for name in READ if name in wide),
        writes=tuple(name for name in WRITTEN if name in (wide if grad else wide - states)),
        narrow=tuple(walked.keys() - wide),
    )


COMPILATIONS = [
    step("*fp32", "*fp32", "*fp32"),
    step("*fp32", "*bf16", "*bf16", prediction="*bf16", scaled=True, numel="i64"),
    step("*bf16", None, "*bf16", message="*bf16"),
    step("*bf16", "*bf16", "*bf16", message="*bf16"),
    step("*fp32", "*fp32", "*fp32", messages=("*bf16",), prediction="*fp32", message="*bf16"),
    step("*fp32", "*fp32", "*fp32", messages=("*fp32",) * 2, prediction="*bf16"),
    step(
        *("*fp32", "*fp32", "*fp32"),
        messages=("*fp32",),
        mix_after=True,
        prediction="*fp32",
        message="*bf16",
        scaled=True,
    ),
]


@pytest.mark.slow  # many kernels; those of SGD, built alike, are compiled by every run
def test_kernels_are_lean_and_move_16_bytes_of_fp32_at_a_time():
    assert find_problems(COMPILATIONS) == []
