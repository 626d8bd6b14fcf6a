"""Releasing and allocating the memory of a module's parameters."""

from collections.abc import Iterable

import torch
from torch import nn


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Free the memory of floating-point parameters and their gradients; entries read as nan."""
    for parameter in parameters:
        nan = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        parameter.data = nan.expand(parameter.shape)
        parameter.grad = None


def allocate(parameters: Iterable[nn.Parameter]) -> None:
    """Allocate the parameters' memory again, uninitialized."""
    for parameter in parameters:
        parameter.data = torch.empty(
            parameter.shape, dtype=parameter.dtype, device=parameter.device
        )


def is_released(parameter: nn.Parameter) -> bool:
    """Return whether the parameter's memory has been released."""
    return parameter.numel() > 1 and not any(parameter.stride())
