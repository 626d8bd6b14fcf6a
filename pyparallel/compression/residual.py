"""Error feedback for compressors without a fused op; a residual is (numel,) float32."""

import torch
from torch import Tensor

RESIDUAL = "residual"

Residual = Tensor | None
"""The error of a buffer's earlier messages, (numel,) float32; None without error feedback."""


def add_residual(x: Tensor, residual: Residual) -> Tensor:
    """Return x plus the residual, (numel,) float32; x itself if it is float32 without residual."""
    return x.float() if residual is None else residual + x


def update_residual(residual: Tensor, total: Tensor, decoded: Tensor) -> None:
    """Set the residual to ``total - decoded``; non-finite entries keep their old residual."""
    lost = total - decoded
    torch.where(lost.isfinite(), lost, residual, out=residual)


def clear_non_finite(buffer: Tensor, largest: Tensor) -> None:
    """Set non-finite entries of a buffer to 0 after the largest entries were sent.

    nan and inf count as the largest: if none was sent, there is none, which saves the CPU a pass.
    (``ops.top_k`` does the same for its residual, on all devices.)
    """
    if buffer.device.type == "cpu" and bool(largest.isfinite().all()):
        return
    buffer.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def check_no_residual(residual: Residual) -> None:
    """Raise ValueError for a residual passed to a compressor with its own error feedback."""
    if residual is not None:
        raise ValueError("residual must be None for a compressor with its own, got a tensor")
