"""``adamw_step_`` in Triton, compiled: few registers, no spills, 16 bytes of fp32 at a time."""

from pyparallel.kernels import adamw_step
from tests.kernels.inspect_triton import Compilation, find_problems

READ = ("param", "grad", "exp_avg", "exp_avg_sq", "messages")
WRITTEN = ("param", "exp_avg", "exp_avg_sq", "prediction", "message")


def step(
    param: str,
    grad: str,
    moments: str,
    *,
    messages: tuple[str, ...] = (),
    prediction: str | None = None,
    message: str | None = None,
    numel: str = "i32",
) -> Compilation:
    optional = {"prediction": prediction, "message": message}
    absent: dict[str, None] = {name: None for name, kind in optional.items() if kind is None}
    walked = {"param": param, "grad": grad, "exp_avg": moments, "exp_avg_sq": moments}
    walked |= {name: kind for name, kind in optional.items() if kind is not None}
    if messages:
        walked["messages"] = messages
    else:
        absent |= {"messages": None, "coefficients": None}
    wide = {name for name, kind in walked.items() if "*fp32" in kind}
    # With messages the mass is on the device, and so are the values computed from it.
    scalar = "*fp32" if messages else "fp32"
    floats = dict.fromkeys(("sign", "pull", "beta2", "share"), "fp32")
    scalars = dict.fromkeys(("decay", "eps", "step_size", "ahead_size"), scalar)
    coefficients = {"coefficients": "*fp32"} if messages else {}
    flags = {"NUM_MESSAGES": len(messages), "FROM_AVERAGE": 1, "BLOCK": adamw_step.BLOCK}
    return Compilation(
        kernel="_adamw_step_kernel",
        module="adamw_step",
        signature={**walked, **floats, **scalars, **coefficients, "numel": numel},
        constants={**absent, **flags},
        options=adamw_step.OPTIONS,
        reads=tuple(name for name in READ if name in wide),
        writes=tuple(name for name in WRITTEN if name in wide),
        narrow=tuple(walked.keys() - wide),
    )


COMPILATIONS = [
    step("*fp32", "*fp32", "*fp32"),
    step("*fp32", "*bf16", "*bf16", prediction="*bf16", numel="i64"),
    step("*bf16", "*bf16", "*bf16", message="*bf16"),
    step("*fp32", "*fp32", "*fp32", messages=("*bf16",), prediction="*fp32", message="*bf16"),
    step("*fp32", "*fp32", "*fp32", messages=("*fp32",) * 2, prediction="*bf16"),
]


def test_kernels_are_lean_and_move_16_bytes_of_fp32_at_a_time():
    assert find_problems(COMPILATIONS) == []
