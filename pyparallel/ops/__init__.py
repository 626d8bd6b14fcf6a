"""The ops: schema, plain-PyTorch reference and public function, one file per op.

Importing this package also loads the faster implementations: the compiled libraries, then Triton
for ops without a CUDA library. ``python -m pyparallel doctor`` prints the outcome.

All raise before anything is written: a ValueError of a tensor of another shape, dtype, device or
layout, of a number or a format out of range, or if what they write overlaps another argument
(``predict_sgd`` and ``predict_adam`` may write an argument itself). What they write must neither
require grad in grad mode nor be an inference tensor outside: a RuntimeError. To avoid a host
synchronization, some is checked on the CPU alone: masses, of at least 0 and a positive sum, and
messages, whose corruption is a RuntimeError; on a GPU that of earlier messages is.
"""

from ._checks import FLOAT_DTYPES
from ._library import Backend, load_native, load_triton, names, warn_of_slower_ops
from .adamw_step import adamw_step_
from .mix import add_or_clear_, mix_, screen_headers
from .mix_quantized import mix_quantized_
from .orthogonalize import orthogonalize_
from .pack_signs import (
    dequantize_statistical,
    pack_signs,
    quantize_statistical,
    unpack_signs,
)
from .predict_adam import predict_adam
from .predict_sgd import predict_sgd
from .quantize import dequantize, dequantize_sum, quantize
from .quantize_difference import quantize_difference_
from .random_k import random_k, random_k_indices
from .sgd_step import clear_nonfinite_, sgd_step_
from .top_k import scatter_add_, scatter_chunks, top_k, top_k_chunks

__all__ = [
    "BACKENDS",
    "FLOAT_DTYPES",
    "Backend",
    "adamw_step_",
    "add_or_clear_",
    "clear_nonfinite_",
    "dequantize",
    "dequantize_statistical",
    "dequantize_sum",
    "implementation",
    "mix_",
    "mix_quantized_",
    "names",
    "orthogonalize_",
    "pack_signs",
    "predict_adam",
    "predict_sgd",
    "quantize",
    "quantize_difference_",
    "quantize_statistical",
    "random_k",
    "random_k_indices",
    "scatter_add_",
    "scatter_chunks",
    "screen_headers",
    "sgd_step_",
    "top_k",
    "top_k_chunks",
    "unpack_signs",
]

# Schemas first (the imports above), then the backends that register kernels.
#: The backends of each device, preferred ones first.
BACKENDS: dict[str, tuple[Backend, ...]] = {
    "cpu": (load_native("cpu"),),
    "cuda": (load_native("cuda"), load_triton()),
}


def implementation(op: str, device: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the implementation that runs an op on a device, and why each faster one does not.

    The device is "cpu" or "cuda"; the reasons are by the names of the backends preferred to it.
    """
    missing: list[tuple[str, str]] = []
    for backend in BACKENDS[device]:
        if op in backend.ops:
            return str(backend), missing
        missing.append((backend.name, backend.unavailable_reason or "does not have this op"))
    return "plain PyTorch (the reference)", missing


warn_of_slower_ops(BACKENDS)
