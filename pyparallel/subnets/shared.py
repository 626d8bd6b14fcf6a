"""What all subnets have whole: averaged when they are merged."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .members import Members


@torch.no_grad()
def average(tensors: Sequence[Tensor], members: Members) -> list[Tensor]:
    """The average of each floating-point tensor over all ranks, in its dtype; one rank's own.

    Sums have twice the bits, so the average of equal numbers is that number.
    """
    if members.size == 1 or not tensors:
        return list(tensors)
    averages: dict[int, Tensor] = {}
    for wide in (torch.float32, torch.float64):
        chosen = [i for i, tensor in enumerate(tensors) if _wide(tensor.dtype) == wide]
        if not chosen:
            continue
        flat = torch.cat([tensors[i].to(wide).reshape(-1) for i in chosen])
        members.sum_(flat)
        flat.div_(members.size)
        pieces = flat.split([tensors[i].numel() for i in chosen])
        for i, piece in zip(chosen, pieces, strict=True):
            averages[i] = piece.view(tensors[i].shape).to(tensors[i].dtype)
    return [averages[i] for i in range(len(tensors))]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else torch.float64
