"""What the ops mean: schema, plain-PyTorch reference and public function, one file per op.

Importing this package also loads whatever serves the ops faster: the compiled libraries, then
Triton for what no CUDA library serves. ``python -m pyparallel doctor`` prints the outcome.
"""

import warnings

from ._library import Backend, load_native, load_triton
from .mix import mix_

__all__ = ["BACKENDS", "Backend", "mix_"]

# Schemas first (the imports above), then the code that registers under them, the preferred first.
BACKENDS: dict[str, tuple[Backend, ...]] = {
    "cpu": (load_native("cpu"),),
    "cuda": (load_native("cuda"), load_triton()),
}

if BACKENDS["cpu"][0].problem:
    warnings.warn(
        "pyparallel runs its CPU ops in plain PyTorch, which is slower: the compiled library is "
        f"{BACKENDS['cpu'][0].problem}",
        RuntimeWarning,
        stacklevel=2,
    )
