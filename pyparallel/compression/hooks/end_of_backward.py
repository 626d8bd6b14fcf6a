"""What runs when a backward pass has ended: errors raised then are not quoted in others."""

from collections.abc import Callable
from typing import Any

import torch


def is_in_backward() -> bool:
    """Return whether this thread runs a part of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function after DDP or FSDP2 has ended this backward pass, which raises its errors.

    By a callback in a callback: they queue one of their own, DDP after its last hook.
    """
    before_end_of_backward(lambda: before_end_of_backward(function))


def raise_at_end_of_backward(error: Exception) -> None:
    """Raise when DDP or FSDP2 has ended this backward pass, else it could not run the next step."""

    def fail() -> None:
        raise error

    if not is_in_backward():
        fail()
    at_end_of_backward(fail)


def before_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when all gradients have been computed, before DDP waits for its buckets.

    An error that it raises is that of the backward pass, which DDP then does not end.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)
