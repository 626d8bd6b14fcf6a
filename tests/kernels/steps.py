"""The launches that the optimizer steps have in common."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tests.kernels.inspect_triton import Compilation


def launch(
    module: ModuleType,
    states: Sequence[str],
    types: tuple[str, str, str | None],
    *,
    floats: Sequence[str],
    scalars: Sequence[str],
    flags: dict[str, int],
    messages: tuple[str, ...] = (),
    mix_after: bool = False,
    prediction: str | None = None,
    message: str | None = None,
    scaled: bool = False,
    counts: bool = False,
    numel: str = "i32",
) -> Compilation:
    """Return a launch of a step's kernel; the types are of parameters, gradient and states."""
    param, grad, state = types
    buffers = {"param": param, "grad": grad, **dict.fromkeys(states, state)}
    buffers |= {"prediction": prediction, "message": message}
    buffers |= {"messages": messages or None}
    walked: dict[str, Any] = {name: kind for name, kind in buffers.items() if kind is not None}
    wide = {name for name, kind in walked.items() if "*fp32" in kind}
    # With messages the mass is on the device, and so are the values computed from it; with a
    # GradScaler so are its scalars.
    amp = {"found_inf": "*fp32"} if scaled else {}
    amp |= {"nonfinite": "*fp64"} if counts else {}
    numbers = dict.fromkeys(floats, "fp32")
    numbers |= dict.fromkeys(scalars, "*fp32" if messages else "fp32")
    numbers |= {"factor": "*fp32" if scaled else "fp32"}
    coefficients = {"coefficients": "*fp32"} if messages else {}
    table = {"table": "*i64", "num_rows": "i32"}
    given = {**walked, **amp, **numbers, **coefficients, **table, "numel": numel}
    optional = (*buffers, "nonfinite", "found_inf", "coefficients")
    absent: dict[str, int | None] = {name: None for name in optional if name not in given}
    flags = {"NUM_MESSAGES": len(messages), "MIX_AFTER": mix_after, **flags}
    name = module.__name__.rpartition(".")[2]
    return Compilation(
        kernel=f"_{name}_kernel",
        module=name,
        signature=given,
        constants={**absent, **flags, "BLOCK": module.BLOCK, "PART": module.PART},
        options=module.OPTIONS,
        reads=tuple(name for name in ("param", "grad", *states, "messages") if name in wide),
        writes=tuple(name for name in ("param", *states, "prediction", "message") if name in wide),
        narrow=tuple(walked.keys() - wide),
    )


def launches(step: Callable[..., Compilation], narrow: str | None) -> list[Compilation]:
    """Return a step's launches; some have narrow states, or none, beside float32 parameters."""
    mixed = {"messages": ("*fp32",), "mix_after": True, "scaled": True}
    return [
        step("*fp32", "*fp32", "*fp32"),
        step("*fp32", "*bf16", narrow, prediction="*bf16", scaled=True, numel="i64"),
        step("*bf16", "*fp16", "*bf16", message="*bf16"),
        step("*bf16", "*bf16", "*bf16", message="*bf16"),
        step("*fp32", "*fp32", "*fp32", messages=("*bf16",), prediction="*fp32", message="*bf16"),
        step("*fp32", "*fp32", "*fp32", messages=("*fp32",) * 2, prediction="*bf16"),
        step("*fp32", "*fp32", "*fp32", prediction="*fp32", message="*bf16", **mixed),
        step("*fp32", "*fp32", "*fp32", counts=True),
        step("*fp32", "*bf16", narrow, prediction="*bf16", scaled=True, counts=True),
    ]
