"""Parameters without memory: what a module has while its parts are trained elsewhere."""

from collections.abc import Iterable

import torch
from torch import nn


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Free the memory of floating-point parameters and their gradients.

    Dtype and shape stay, and each reads as nan everywhere, so that nobody takes what is there for
    the model.
    """
    for parameter in parameters:
        nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)
        parameter.grad = None


def allocate(parameters: Iterable[nn.Parameter]) -> None:
    """Give them memory again, to be written."""
    for parameter in parameters:
        parameter.data = torch.empty(
            parameter.shape, dtype=parameter.dtype, device=parameter.device
        )


def is_released(parameter: nn.Parameter) -> bool:
    """Whether there is nothing to read."""
    return parameter.numel() > 1 and not any(parameter.stride())
