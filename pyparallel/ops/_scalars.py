"""Numbers that may change every step: from Python, or from tensors that nobody waits for."""

import torch
from torch import Tensor

from ._checks import check_scalar

Number = float | int | Tensor


def as_scalar(name: str, number: Number, model: Tensor) -> Tensor:
    """A 0-d float64 tensor; one that lies on the model's device stays there, unread.

    Raises:
        ValueError: a tensor that is not 0-d, or on a third device.
    """
    if not isinstance(number, Tensor):
        return torch.tensor(number, dtype=torch.float64)
    check_scalar(name, number, model)
    return number.to(torch.float64)


def require(name: str, rule: str, number: Number, holds: bool | Tensor) -> None:
    """Refuse a number of Python's that breaks a rule; tensors are not looked into."""
    if not isinstance(number, Tensor) and not holds:
        raise ValueError(f"{name} must be {rule}, got {number}")
