"""What all subnets have whole: averaged when they are merged."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .collectives import SubnetCollectives


@torch.no_grad()
def average(tensors: Sequence[Tensor], members: SubnetCollectives) -> list[Tensor]:
    """The average of each floating-point tensor over all ranks, in its dtype; one rank's own.

    The average of equal numbers is that number, to the bit: each rank averages a part of them from
    all ranks, which no all-reduce would do, and sends it to all. Travels as much as one.
    """
    if members.size == 1:
        return list(tensors)
    averages: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = _average_flat(torch.cat([tensors[index].reshape(-1) for index in chosen]), members)
        pieces = flat.split([tensors[index].numel() for index in chosen])
        for index, piece in zip(chosen, pieces, strict=True):
            averages[index] = piece.view(tensors[index].shape)
    return [averages[index] for index in range(len(tensors))]


def _average_flat(flat: Tensor, members: SubnetCollectives) -> Tensor:
    bounds = [part * flat.numel() // members.size for part in range(members.size + 1)]
    lengths = [end - begin for begin, end in pairwise(bounds)]
    mine = [lengths[members.rank]] * members.size
    theirs = members.exchange(flat, lengths, mine).view(members.size, -1)
    return members.exchange(_mean(theirs).repeat(members.size), mine, lengths)


def _mean(rows: Tensor) -> Tensor:
    """Of all rows; the first one where all are equal, infinities too."""
    first = rows[0]
    wide = rows.to(torch.float32 if rows.dtype.itemsize < 4 else torch.float64)
    mean = wide[0] + (wide - wide[0]).sum(0) / len(rows)
    return torch.where((rows == first).all(0), first, mean.to(rows.dtype))
