"""``torch.profiler``: the package's own ranges, and messages that outlive a profile."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler
from torch.futures import Future


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a range of the profiler that runs; without one it costs a fraction of torch's."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


def profiled_start(name: str, start: Callable[..., Future[Any]], *arguments: Any) -> Future[Any]:
    """Start what another thread completes, in a range of this thread that ends with its future.

    A profiler sees nothing of a thread that was running before it.
    """
    if profiler._is_profiler_enabled:
        with profiler.record_function(name) as running:
            ended: Future[Any] = running._call_end_callbacks_on_future(start(*arguments))
            return ended
    return start(*arguments)


def post(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what posts a point-to-point message, unseen by a profiler that it may outlive.

    Gloo's work ends a record of ``torch.profiler`` when the message has arrived, in memory that is
    freed if the profile is over.
    """
    if not profiler._is_profiler_enabled:
        return function(*arguments)
    enable: Any = torch.autograd._enable_record_function  # type: ignore[attr-defined]  # re-exported
    enable(False)
    try:
        return function(*arguments)
    finally:
        enable(True)
