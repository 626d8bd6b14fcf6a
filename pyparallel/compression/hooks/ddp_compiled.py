"""Compressed gradients in compiled DDP, whose graph averages one gradient at a time."""

import weakref
from collections.abc import Callable
from itertools import count
from types import MethodType

import torch
from torch import Tensor
from torch.library import Library, register_fake

_NAMESPACE = "pyparallel_compression"


class StepDetector:
    """Detects steps when no gradient is marked as the last: a parameter's second one begins one."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def is_new_step(self, name: str) -> bool:
        """Return whether this parameter's gradient begins a new step."""
        first = not self._seen or name in self._seen
        self._seen = {name} if first else self._seen | {name}
        return first


class CustomOp:
    """A method as a PyTorch operator, which compilers call without tracing into it.

    A function hidden from compilers breaks the graph at each parameter, which takes more than a
    second each to compile. The operator lives as long as this object, which does not keep the
    method's alive. The method writes its gradient.
    """

    def __init__(self, method: Callable[[Tensor, Tensor], None]) -> None:
        assert isinstance(method, MethodType)
        called = weakref.WeakMethod(method)

        def call(gradient: Tensor, parameter: Tensor) -> None:
            alive = called()
            assert alive is not None
            alive(gradient, parameter)

        operators = getattr(torch.ops, _NAMESPACE)
        # The same in every run, so that compile caches are found again.
        names = map("average_{}_".format, count())
        name = next(each for each in names if not hasattr(operators, each))
        library = Library(_NAMESPACE, "FRAGMENT")
        library.define(f"{name}(Tensor(a!) gradient, Tensor parameter) -> ()")
        library.impl(name, call, "CompositeExplicitAutograd")
        register_fake(f"{_NAMESPACE}::{name}", lambda *_: None, lib=library)
        # A collected library of torch 2.11 leaves its operator in torch.ops.
        weakref.finalize(self, library._destroy).atexit = False
        self.op: Callable[[Tensor, Tensor], None] = getattr(operators, name).default
