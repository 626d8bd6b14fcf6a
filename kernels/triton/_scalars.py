"""Scalars passed as kernel arguments, or read on the device."""

from torch import Tensor

import triton
import triton.language as tl


def argument(number: Tensor) -> float | Tensor:
    """Return a 0-d tensor as a kernel argument, in fp32.

    One on the host becomes a float argument: neither a copy nor a synchronization, so
    that a graph can hold the launch. One on the device stays there, unread.
    """
    rounded = number.float()
    return rounded.item() if rounded.is_cpu else rounded


@triton.jit
def read(number):
    """Return the value of such an argument."""
    # In the interpreter a float argument is a Python float, without a dtype.
    return tl.load(number) if hasattr(number, "dtype") and number.dtype.is_ptr() else number
