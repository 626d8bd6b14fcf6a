"""Averaging of the tensors that all subnets hold in full."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..comm import Collectives


@torch.no_grad()
def average(tensors: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
    """Return the average of each floating-point tensor over all ranks, in its dtype.

    The average of equal numbers is that number, bit for bit, which all-reduce does not ensure: each
    rank averages one part and sends it to all. The traffic is that of an all-reduce.
    """
    if collectives.size == 1:
        return list(tensors)
    averages: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = _average_flat(
            torch.cat([tensors[index].reshape(-1) for index in chosen]), collectives
        )
        pieces = flat.split([tensors[index].numel() for index in chosen])
        for index, piece in zip(chosen, pieces, strict=True):
            averages[index] = piece.view(tensors[index].shape)
    return [averages[index] for index in range(len(tensors))]


def _average_flat(flat: Tensor, collectives: Collectives) -> Tensor:
    bounds = [part * flat.numel() // collectives.size for part in range(collectives.size + 1)]
    lengths = [end - begin for begin, end in pairwise(bounds)]
    mine = [lengths[collectives.rank]] * collectives.size
    theirs = collectives.all_to_all(flat, lengths, mine).view(collectives.size, -1)
    return collectives.all_to_all(_mean(theirs).repeat(collectives.size), mine, lengths)


def _mean(rows: Tensor) -> Tensor:
    first = rows[0]
    wide = rows.to(torch.float32 if rows.dtype.itemsize < 4 else torch.float64)
    mean = wide[0] + (wide - wide[0]).sum(0) / len(rows)
    return torch.where((rows == first).all(0), first, mean.to(rows.dtype))
