"""Error feedback for compressors whose kernels do not have it inside."""

import torch
from torch import Tensor

RESIDUAL = "residual"


def add_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    """What is to be encoded, (numel,) float32: x itself where it already is that."""
    return x.float() if residual is None else residual + x


def update_residual(residual: Tensor, total: Tensor, decoded: Tensor) -> None:
    """Keep what a message loses of ``total``; where that is not finite, what was kept before.

    Args:
        residual: (numel,) float32. Written.
        total: (numel,) float32: what was encoded.
        decoded: (numel,), what it decodes to.
    """
    lost = total - decoded
    torch.where(lost.isfinite(), lost, residual, out=residual)


def accumulate_residual(residual: Tensor, lost: Tensor, times: int) -> None:
    """Add what was lost, so many times over; where float32 has no such number, nothing.

    Args:
        residual: (numel,) float32. Written.
        lost: (numel,) float32.
        times: at least 1.
    """
    total = torch.add(residual, lost, alpha=times)
    torch.where(total.isfinite(), total, residual, out=residual)


def clear_non_finite(residual: Tensor | None, largest: Tensor) -> None:
    """Let nothing that is not finite stay in a residual after the largest entries were sent.

    nan and inf count as the largest of all: where none was sent, on the CPU, there is none.

    Args:
        residual: (numel,) float32. Written.
        largest: (k,), what was sent.
    """
    if residual is None or (residual.device.type == "cpu" and bool(largest.isfinite().all())):
        return
    residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def check_no_residual(residual: Tensor | None) -> None:
    """Refuse one that is handed to a compressor which feeds back itself."""
    if residual is not None:
        raise ValueError("residual must be None where a compressor keeps its own, got a tensor")
