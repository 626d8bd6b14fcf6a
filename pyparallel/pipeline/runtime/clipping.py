"""Gradient clipping by the norm of the whole model."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Collectives, device_of


def clip_grad_norm_(
    gradients: Sequence[Tensor], max_norm: float, process_group: dist.ProcessGroup | None
) -> None:
    """Scale gradients across ranks as ``torch.nn.utils.clip_grad_norm_`` does on one.

    Every rank of the group must call this.

    Args:
        gradients: this rank's; scaled in place.
        max_norm: the largest 2-norm over all ranks.
        process_group: None means the default group, or this rank alone where there is none.
    """
    is_alone = process_group is None and not dist.is_initialized()
    own = gradients[0].device if gradients else None
    device = own or (torch.device("cpu") if is_alone else device_of(process_group))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    Collectives(process_group).all_reduce_(total)
    ratio = max_norm / (total.sqrt() + 1e-6)
    scale = torch.where(ratio < 1.0, ratio, 1.0)
    factor = scale.item() if scale.is_cpu else scale  # on a GPU the host would wait
    for gradient in gradients:
        gradient.mul_(factor)
