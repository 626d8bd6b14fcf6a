"""What compiled DDP has instead of buckets: gradients that come one by one, inside of a graph."""

import weakref
from collections.abc import Callable
from itertools import count
from types import MethodType

import torch
from torch import Tensor
from torch.library import Library, register_fake

from ...comm.collectives import Collectives
from ..layout import BufferLayout
from ..state_store import StateStore

_NAMESPACE = "pyparallel_compression"


@torch.no_grad()
def average_gradient_(
    gradient: Tensor,
    parameter: Tensor,
    layout: BufferLayout,
    store: StateStore,
    collectives: Collectives,
) -> None:
    """Replace one parameter's gradient, of whatever strides, by its mean over ranks.

    Entries are encoded in the order in which the parameter's lie in memory, as in DDP's buckets.

    Args:
        gradient: of any shape; float32, bfloat16 or float16. Written.
        parameter: that it is of.
        layout: of this parameter alone, in that order.
        memory: of all that its messages need.
        ranks: who takes part; all call it in the same order of parameters.

    Raises:
        CorruptMessageError: on every rank, naming the rank whose message it was.
    """
    in_order = gradient.permute(memory_order(parameter))
    flat = in_order.reshape(-1)
    store.compressor.mean_(flat, store.of(layout, gradient.device), collectives)
    if not in_order.is_contiguous():  # then flat is a copy
        in_order.copy_(flat.view_as(in_order))


def memory_order(parameter: Tensor) -> list[int]:
    """Of dimensions, from the one with the longest strides; as they are where there are gaps."""
    dimensions = list(range(parameter.dim()))
    order = sorted(dimensions, key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else dimensions


class StepDetector:
    """Tells steps apart where nobody says which gradient is the last one.

    A step has one gradient of a parameter: the second one begins another step.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def is_new_step(self, name: str) -> bool:
        """Whether a step begins with this parameter's gradient."""
        first = not self._seen or name in self._seen
        self._seen = {name} if first else self._seen | {name}
        return first


class CustomOp:
    """A method as an operator of PyTorch's: compilers call it, and do not look into it.

    A graph may hold it whole, where a function that is hidden from compilers breaks the graph at
    each parameter, which takes more than a second each to compile. It lives as long as this object.

    Args:
        method: of a gradient, which it writes, and its parameter. Its object is not kept alive.
    """

    def __init__(self, method: Callable[[Tensor, Tensor], None]) -> None:
        assert isinstance(method, MethodType)
        called = weakref.WeakMethod(method)

        def call(gradient: Tensor, parameter: Tensor) -> None:
            alive = called()
            assert alive is not None
            alive(gradient, parameter)

        name = _unused_name()
        self._library = Library(_NAMESPACE, "FRAGMENT")
        self._library.define(f"{name}(Tensor(a!) gradient, Tensor parameter) -> ()")
        self._library.impl(name, call, "CompositeExplicitAutograd")
        register_fake(f"{_NAMESPACE}::{name}", lambda *_: None, lib=self._library)
        self.op: Callable[[Tensor, Tensor], None] = getattr(_operators(), name).default


def _unused_name() -> str:
    """The same from one run to the next, so that what was compiled is found again."""
    return next(name for name in map("average_{}_".format, count()) if _is_unused(name))


def _is_unused(name: str) -> bool:
    return not hasattr(_operators(), name)


def _operators() -> object:
    return getattr(torch.ops, _NAMESPACE)
