"""``adamw_step_`` in Triton, compiled: few registers, no spills, 16 bytes of fp32 at a time."""

from typing import Any

from pyparallel.kernels import adamw_step
from tests.kernels.inspect_triton import Compilation
from tests.kernels.steps import launch, launches


def step(*types: Any, scaled: bool = False, **options: Any) -> Compilation:
    return launch(
        adamw_step,
        ("exp_avg", "exp_avg_sq"),
        types,
        floats=("pull", "beta2", "share"),
        scalars=("decay", "eps", "step_size", "ahead_size"),
        flags={"FROM_AVERAGE": 1, "DECOUPLED": not scaled},
        scaled=scaled,
        **options,
    )


COMPILATIONS = launches(step, narrow="*bf16")
