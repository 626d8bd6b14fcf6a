"""Parity harness: results and arguments of every implementation against the reference."""

import copy
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch.utils import _pytree as pytree

from pyparallel import ops
from tests.cases import pairwise, slow
from tests.csrc.emulated import emulated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# 0, 1, a prime, multiples of blocks and one more for each size, several CPU threads' shares.
LENGTHS = [0, 1, 7, 1024, 1025, 4096, 4097, 32769, 100003]


def double(number: float) -> torch.Tensor:
    """Return a number as a 0-d float64 tensor, as the ops take it."""
    return torch.tensor(number, dtype=torch.float64)


@dataclass(frozen=True)
class Implementation:
    """An implementation: how it is found (by op name), and the device of its tensors.

    Args:
        cases: returns which rows of the product of some axes it is tested with.
        is_slow: it is interpreted or emulated, and tested with fewer cases.
        longest: the largest length that it is tested with.
        num_messages: more than one launch takes.
    """

    name: str
    device: str
    find: Callable[[str], Callable[..., Any]]
    cases: Callable[..., Iterable[tuple[Any, ...]]] = product
    is_slow: bool = False
    longest: int = LENGTHS[-1]
    num_messages: int = 150

    def __str__(self) -> str:
        return self.name

    @property
    def lengths(self) -> list[int]:
        return [numel for numel in LENGTHS if numel <= self.longest]


def once(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows in which each value occurs, next to different ones of axes that are alike."""
    turned = [islice(cycle(axis), turn, None) for turn, axis in enumerate(axes)]
    return list(islice(zip(*turned, strict=False), max(map(len, axes))))


def _dispatched(op: str) -> Callable[..., Any]:
    return getattr(torch.ops.pyparallel, op)


def _launched(op: str) -> Callable[..., Any]:
    file = getattr(ops, op).__module__.rpartition(".")[2]  # an op and its inverse share one
    return getattr(importlib.import_module(f"pyparallel.kernels.{file}"), op)


COMPILED_CPU = Implementation("compiled-cpu", "cpu", _dispatched, pairwise)
INTERPRETED = Implementation(
    "triton-interpreter", "cpu", _launched, once, is_slow=True, longest=4097, num_messages=20
)
EMULATED_CUDA = Implementation(
    "emulated-cuda", "cpu", emulated, pairwise, is_slow=True, longest=32769
)
COMPILED_CUDA = Implementation("compiled-cuda", "cuda", _dispatched)
TRITON = Implementation("triton", "cuda", _launched)

# On a GPU the kernels run as they are. Elsewhere Triton's run under its interpreter (see
# conftest.py), and those of CUDA under the emulator of tests/csrc.
IMPLEMENTATIONS = [
    COMPILED_CPU,
    *([COMPILED_CUDA, TRITON] if torch.cuda.is_available() else [INTERPRETED, EMULATED_CUDA]),
]
WITH_EVERY_CASE = [slow(replace(COMPILED_CPU, name="compiled-cpu, every case", cases=product))]
if INTERPRETED in IMPLEMENTATIONS:
    pairs = replace(INTERPRETED, name="triton-interpreter, pairs", cases=pairwise)
    WITH_EVERY_CASE.append(slow(pairs))
each_implementation = pytest.mark.parametrize(
    "implementation", [*IMPLEMENTATIONS, *WITH_EVERY_CASE], ids=str
)

# Ops that are not element-wise have no Triton kernel.
COMPILED = [each for each in IMPLEMENTATIONS if each not in (INTERPRETED, TRITON)]
# The CUDA kernels: on a GPU, or under the emulator.
ON_GPU = COMPILED[-1]
each_compiled = pytest.mark.parametrize("implementation", [*COMPILED, WITH_EVERY_CASE[0]], ids=str)

fuzz = settings(deadline=None, max_examples=20)


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
    try:
        _compare(implementation, op, reference, arguments, tolerance or {"rtol": 0.0, "atol": 0.0})
    except Exception as error:
        raise AssertionError(f"{implementation}: {op}({_describe(arguments)})") from error


def _compare(
    implementation: Implementation,
    op: str,
    reference: Callable[..., Any],
    arguments: tuple[Any, ...],
    tolerance: dict[str, float],
) -> None:
    if implementation.find is _dispatched:
        require_compiled(implementation.device)
    expected = copy.deepcopy(arguments)
    expected_result = reference(*expected)
    actual = arguments_on(implementation.device, op, arguments)
    with np.errstate(all="ignore"):  # numpy in the interpreter warns of inf and nan
        actual_result = implementation.find(op)(*actual)
    torch.testing.assert_close(
        _tensors((actual, actual_result)),
        _tensors((expected, expected_result)),
        **tolerance,
        equal_nan=True,
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf.cpu() for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta]


def _describe(argument: Any) -> str:
    """Return a case in a line: of a tensor its dtype, shape and first entry."""
    if isinstance(argument, (tuple, list)):
        return ", ".join(_describe(each) for each in argument[:20])
    if not isinstance(argument, torch.Tensor):
        return repr(argument)
    kind = str(argument.dtype).removeprefix("torch.")
    first = f" from {argument.flatten()[0].item():.4g}" if argument.numel() else ""
    return f"{kind}{list(argument.shape)}{first}"


def assert_refused(
    op: Callable[..., Any],
    sample: Callable[[], dict[str, Any]],
    rows: Iterable[tuple[dict[str, Any], str]],
    direct: Callable[[dict[str, Any]], Iterable[Any]] | None = None,
) -> None:
    """Check that the op raises each row's text for the row's changes to a sample's arguments.

    ``direct`` returns the arguments of the compiled op, which must raise an error that names the
    first argument of the text. Neither may write anything.
    """
    problems = []
    for changes, text in rows:
        arguments = sample() | changes
        before = copy.deepcopy(arguments)
        problems += find_problem(partial(op, **arguments), ValueError, text)
        if direct:
            name = re.split(r"\W", text)[0]
            call = partial(_dispatched(op.__name__), *direct(arguments))
            problems += find_problem(call, RuntimeError, rf"\b{name}\b(?!'s)")
        pairs = zip(_tensors(arguments), _tensors(before), strict=True)
        if not all(torch.equal(after.nan_to_num(), old.nan_to_num()) for after, old in pairs):
            problems += [f"expected {text!r} before anything is written"]
    assert not problems, "\n".join(problems)


def assert_refused_directly(op: str, rows: Iterable[tuple[tuple[Any, ...], str]]) -> None:
    """Check that the compiled op raises an error with the text for each row of arguments."""
    calls = [(partial(_dispatched(op), *arguments), text) for arguments, text in rows]
    problems = [each for call, text in calls for each in find_problem(call, RuntimeError, text)]
    assert not problems, "\n".join(problems)


def assert_corrupt_is_refused(
    op: str, reference: Callable[..., Any], arguments: tuple[Any, ...], text: str
) -> None:
    """Check that the compiled op and the reference raise the text before anything is written."""
    require_compiled("cpu")
    before = copy.deepcopy(arguments)
    for call in (_dispatched(op), reference):
        with pytest.raises(RuntimeError, match=text):
            call(*arguments)
        torch.testing.assert_close(
            _tensors(arguments), _tensors(before), rtol=0.0, atol=0.0, equal_nan=True
        )


READ_ON_THE_HOST = {"screen_headers": 1}  # the place of an argument


def arguments_on(
    device: str | torch.device, op: str, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return copies of an op's arguments, with their tensors on a device or where it wants them."""
    host = READ_ON_THE_HOST.get(op)
    copied = copy.deepcopy(arguments)
    return tuple(each if i == host else moved(each, device) for i, each in enumerate(copied))


def moved(tree: Any, device: str | torch.device) -> Any:
    """Return arguments with their tensors on a device, where rows of messages keep their gaps."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = tensor.as_strided((length,), (1,), 0)
        there = whole.to(device)
        if there is whole:
            return tensor
        return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return pytree.tree_map_only(torch.Tensor, move, tree)


def find_problem(call: Callable[[], Any], error_type: type[Exception], text: str) -> list[str]:
    """Return what is wrong with the error of a call, at most one sentence."""
    require_compiled("cpu")
    try:
        call()
    except error_type as error:
        matches = re.search(text, str(error))
        return [] if matches else [f"expected {text!r}, got {str(error).splitlines()[0]!r}"]
    return [f"expected {text!r}, got no error"]
