"""Numbers that come with a launch, or that only the device knows."""

import torch
from torch import Tensor

import triton
import triton.language as tl


def argument(number: Tensor) -> float | Tensor:
    """A 0-d tensor as kernels take it, in fp32.

    One on the host becomes a float, which travels with the launch: neither a copy nor a wait, so
    that a graph can hold the launch. One on the device stays there, unread.
    """
    rounded = number.float()
    return rounded.item() if rounded.is_cpu else rounded


@triton.jit
def read(number):
    """The value of such an argument."""
    # To the interpreter a float is a float, without a dtype.
    return tl.load(number) if tl.to_tensor(number).dtype.is_ptr() else number


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """A 0-d tensor there; one from the host by a launch, not by a copy that no graph can hold."""
    if number.device == device:
        return number
    return torch.full((), number.item(), dtype=number.dtype, device=device)
