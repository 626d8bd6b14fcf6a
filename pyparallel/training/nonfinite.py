"""Values with a nan or an inf: the policy, which each trainer documents, and how they are found."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as _flatten

from .arguments import one_of, summarize

NonFinitePolicy = Literal["raise", "skip", "allow"]
"""What is done about gradients with a nan or an inf."""

_SMALL = 1024  # elements: on the CPU a call for each such tensor takes longer than to copy all


def find_policy_error(
    nonfinite: object, policies: Sequence[str] = ("raise", "skip", "allow")
) -> str | None:
    """Return why an argument is no policy for values that are not finite, or None."""
    if isinstance(nonfinite, str) and nonfinite in policies:
        return None
    return f"nonfinite must be {one_of(policies)}, got {summarize(nonfinite)}"


def is_finite(x: Tensor) -> bool:
    """Return whether all entries of a tensor are finite; the host waits for it."""
    # A sum is not finite if an entry is not; where finite entries overflow, x is read again.
    if x.dtype != torch.float16 and bool(x.sum().isfinite()):
        return True
    return bool(is_finite_on_device(x))


def is_finite_on_device(x: Tensor, *, allow_inf: bool = False) -> Tensor:
    """Return whether all entries of a tensor are finite, or no nan, as 0-d bool; reads x once."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    bounds = torch.stack(x.aminmax())
    return (bounds.isnan().logical_not() if allow_inf else bounds.isfinite()).all()


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether all entries of tensors are finite, as 0-d bool on their device, read once."""
    on_cpu = bool(tensors) and tensors[0].is_cpu
    limit = _SMALL if on_cpu else 0
    parts = [tensor for tensor in tensors if tensor.numel() > limit]
    if on_cpu and len(parts) < len(tensors):
        parts.append(_flatten([each for each in tensors if each.numel() <= limit]))
    if not parts:
        return torch.ones((), dtype=torch.bool, device="cpu")
    of_dtypes = [
        torch.stack(torch._foreach_norm(some, 2.0 if on_cpu else math.inf)).isfinite().all()
        for dtype in dict.fromkeys(part.dtype for part in parts)
        if (some := [each for each in parts if each.dtype == dtype])
    ]
    are_finite = of_dtypes[0] if len(of_dtypes) == 1 else torch.stack(of_dtypes).all()
    # The Euclidean norm, which is faster there, may overflow where no entry does.
    if on_cpu and not are_finite:
        return torch.tensor(not any(map(count_nonfinite, tensors)), device="cpu")
    return are_finite


def count_nonfinite(x: Tensor) -> int:
    """Return the number of entries that are not finite; the host waits for it."""
    return x.numel() - int(x.isfinite().sum())


def first_nonfinite(tensors: Iterable[Tensor]) -> int:
    """Return the index of the first tensor that is not finite, or -1; the host waits for it."""
    return next((index for index, each in enumerate(tensors) if not is_finite(each)), -1)
