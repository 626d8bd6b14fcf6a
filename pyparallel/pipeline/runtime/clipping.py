"""Gradient clipping by the norm of the whole model."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Collectives


def clip_grad_norm_(
    gradients: Sequence[Tensor], max_norm: float, process_group: dist.ProcessGroup | None
) -> float:
    """Scale gradients across ranks as ``torch.nn.utils.clip_grad_norm_`` does on one.

    Every rank of the group must call this.

    Args:
        gradients: this rank's; scaled in place.
        max_norm: the largest 2-norm over all ranks.
        process_group: None means the default group, or this rank alone where there is none.

    Returns:
        The norm before clipping.
    """
    device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    Collectives(process_group).all_reduce_(total)
    norm = total.sqrt().item()
    scale = min(1.0, max_norm / (norm + 1e-6))
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
