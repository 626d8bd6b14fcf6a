"""Compile every Triton kernel with the Triton that is imported first, and print what is wrong.

Run as ``python -m tests.kernels.every_kernel sm_90``; prints Triton's version, the number of
kernels and the unmet requirements as JSON.
"""

import json
import sys
from importlib import import_module
from itertools import product
from pathlib import Path

from tests.kernels.inspect_triton import Compilation, find_problems_of

KERNELS = sorted(path.stem for path in Path(__file__).parent.glob("test_[!_]*.py"))


def compilations(name: str) -> list[Compilation]:
    """Return what a test file compiles."""
    found: list[Compilation] = import_module(f"tests.kernels.{name}").COMPILATIONS
    return found


def report(architecture: str) -> dict[str, object]:
    """Compile for the architecture; return what is printed."""
    import triton

    found = [each for name in KERNELS for each in compilations(name)]
    problems = find_problems_of(product(found, [architecture]))
    return {"version": triton.__version__, "number": len(found), "problems": problems}


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1])))  # noqa: T201
