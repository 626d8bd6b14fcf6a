"""``predict_sgd`` in Triton, compiled: few registers, no spills, 16 bytes at a time."""

from pyparallel.kernels import predict_sgd
from tests.kernels.inspect_triton import Compilation


def predict(
    param: str, momentum_buffer: str, out: str, scale: str = "fp32", numel: str = "i32"
) -> Compilation:
    buffers = {"param": param, "momentum_buffer": momentum_buffer, "out": out}
    return Compilation(
        kernel="_predict_sgd_kernel",
        module="predict_sgd",
        signature={**buffers, "scale": scale, "numel": numel},
        constants={"BLOCK": predict_sgd.BLOCK},
        options=predict_sgd.OPTIONS,
        reads=("param", "momentum_buffer"),
        writes=("out",),
    )


COMPILATIONS = [
    predict("*fp32", "*fp32", "*fp32"),
    predict("*fp32", "*fp32", "*bf16", numel="i64"),
    predict("*bf16", "*bf16", "*bf16", scale="*fp32"),
    predict("*fp16", "*fp32", "*fp16"),
]
