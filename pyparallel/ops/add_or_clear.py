"""``add_or_clear_``: add to a buffer without overflow, or clear it where a flag says so."""

import torch
from torch import Tensor

from ._checks import check_buffer, check_like, check_tensor
from ._library import checked, define


def add_or_clear_reference(x: Tensor, y: Tensor | None, times: float, clear: Tensor | None) -> None:
    """Compute the op in plain PyTorch: the definition that all kernels are tested against."""
    if y is not None:
        total = torch.add(x.float(), y.float(), alpha=times).to(x.dtype)
        x.copy_(torch.where(total.isfinite(), total, x))
    if clear is not None:
        x.masked_fill_(clear, 0.0)


add_or_clear_unchecked = define(
    "add_or_clear_(Tensor(a!) x, Tensor? y, float times, Tensor? clear) -> ()",
    add_or_clear_reference,
)
_add_or_clear_checked = checked(add_or_clear_unchecked)


def add_or_clear_(
    x: Tensor, y: Tensor | None = None, *, times: float = 1.0, clear: Tensor | None = None
) -> Tensor:
    """Add ``times * y`` to a buffer, in place; or, if the flag is set, make it 0.

    Each sum is rounded once, in float32, then to x's dtype; an entry whose sum is not finite stays
    as it is. The host does not read the flag: a kernel that has nothing to add reads it and is over
    if it is not set.

    Args:
        x: (n,) float32, bfloat16 or float16. Written.
        y: (n,) in one of these dtypes; None: nothing is added.
        times: factor of y.
        clear: 0-d bool on x's device: whether x becomes 0; None: it does not.

    Returns:
        x.
    """
    check_buffer("x", x)
    if y is not None:
        check_like("y", y, "x", x)
    if clear is not None:
        check_tensor("clear", clear, torch.bool, (), x.device, "x's device")
    _add_or_clear_checked(x, y, float(times), clear)
    return x
