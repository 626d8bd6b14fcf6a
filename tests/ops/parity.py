"""Parity harness: results and arguments of every implementation against the reference."""

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from pyparallel import ops
from tests.csrc.emulated import emulated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# 0, 1, a prime, multiples of blocks and one more for each size, a CPU thread's share.
LENGTHS = [0, 1, 7, 1024, 1025, 4096, 4097, 32769, 100003]


def double(number: float) -> torch.Tensor:
    """Return a number as a 0-d float64 tensor, as the ops take it."""
    return torch.tensor(number, dtype=torch.float64)


@dataclass(frozen=True)
class Implementation:
    """An implementation: how it is found (by op name), and the device of its tensors."""

    name: str
    device: str
    find: Callable[[str], Callable[..., Any]]

    def __str__(self) -> str:
        return self.name


def _dispatched(op: str) -> Callable[..., Any]:
    return getattr(torch.ops.pyparallel, op)


def _launched(op: str) -> Callable[..., Any]:
    file = getattr(ops, op).__module__.rpartition(".")[2]  # an op and its inverse share one
    return getattr(importlib.import_module(f"pyparallel.kernels.{file}"), op)


COMPILED_CPU = Implementation("compiled-cpu", "cpu", _dispatched)
INTERPRETED = Implementation("triton-interpreter", "cpu", _launched)
EMULATED_CUDA = Implementation("emulated-cuda", "cpu", emulated)
COMPILED_CUDA = Implementation("compiled-cuda", "cuda", _dispatched)
TRITON = Implementation("triton", "cuda", _launched)

# On a GPU the kernels run as they are. Elsewhere Triton's run under its interpreter (see
# conftest.py), and those of CUDA under the emulator of tests/csrc.
IMPLEMENTATIONS = [
    COMPILED_CPU,
    *([COMPILED_CUDA, TRITON] if torch.cuda.is_available() else [INTERPRETED, EMULATED_CUDA]),
]


def require_compiled(device: str) -> None:
    """Fail if the library is missing: the reference would be compared with itself."""
    backend = ops.BACKENDS[device][0]
    reason = backend.unavailable_reason
    assert reason is None, f"the {backend.name} library is {reason}"


def assert_parity(
    implementation: Implementation,
    op: str,
    reference: Callable[..., Any],
    arguments: tuple[Any, ...],
    **tolerance: float,
) -> None:
    """Run both on copies; results and written arguments must agree (exactly, by default)."""
    if implementation.find is _dispatched:
        require_compiled(implementation.device)
    expected = copy.deepcopy(arguments)
    expected_result = reference(*expected)
    actual = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(implementation.device), copy.deepcopy(arguments)
    )
    with np.errstate(all="ignore"):  # numpy in the interpreter warns of inf and nan
        actual_result = implementation.find(op)(*actual)
    torch.testing.assert_close(
        _tensors((actual, actual_result)),
        _tensors((expected, expected_result)),
        **(tolerance or {"rtol": 0.0, "atol": 0.0}),
        equal_nan=True,
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf.cpu() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def short_error(error_text: str) -> str:
    """Return a pattern of compiled code's error where the public function raises this one.

    It names the argument (without an index) and the rule: ``z: expected a contiguous ...``.
    """
    name = error_text.partition(" must ")[0].partition("\\[")[0]
    return rf"\b{name}: expected .*; call the op of pyparallel.ops for details"


def assert_refused(
    op: Callable[..., Any], arguments: tuple[Any, ...] | dict[str, Any], error_text: str
) -> None:
    """Check that the public function raises the message, and compiled code its short one."""
    named = arguments if isinstance(arguments, dict) else {}
    placed = () if named else arguments
    with pytest.raises(ValueError, match=error_text):
        op(*placed, **named)
    require_compiled("cpu")
    with pytest.raises(RuntimeError, match=short_error(error_text)):
        _dispatched(op.__name__)(*placed, **named)
