"""``predict_adam`` in Triton, compiled: few registers, no spills, 16 bytes at a time."""

from pyparallel.kernels import predict_adam
from tests.kernels.inspect_triton import Compilation


def predict(
    param: str, moments: str, out: str, scalar: str = "fp32", numel: str = "i32"
) -> Compilation:
    buffers = {"param": param, "exp_avg": moments, "exp_avg_sq": moments, "out": out}
    return Compilation(
        kernel="_predict_adam_kernel",
        module="predict_adam",
        signature={**buffers, "step_size": scalar, "eps": scalar, "numel": numel},
        constants={"BLOCK": predict_adam.BLOCK},
        options=predict_adam.OPTIONS,
        reads=("param", "exp_avg", "exp_avg_sq"),
        writes=("out",),
    )


COMPILATIONS = [
    predict("*fp32", "*fp32", "*fp32"),
    predict("*fp32", "*fp32", "*bf16", numel="i64"),
    predict("*bf16", "*bf16", "*bf16", scalar="*fp32"),
    predict("*fp32", "*bf16", "*bf16"),
]
