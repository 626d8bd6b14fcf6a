"""The exact average over all ranks, and the ranks' distance from it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..comm import Collectives
from .shards import gather


@torch.no_grad()
def average(tensors: Sequence[Tensor], weight: Tensor, collectives: Collectives) -> list[Tensor]:
    """Return the average sum_i w_i z_i / sum_i w_i of each tensor over all ranks, in float64.

    Args:
        tensors: z: floating-point tensors, of equal shapes on all ranks.
        weight: w: 0-d float64, this rank's push-sum weight.
    """
    total = weight.clone()
    collectives.all_reduce_(total)
    averages = []
    for tensor in tensors:
        wide = tensor.double() * weight
        collectives.all_reduce_(wide)
        averages.append(wide.div_(total))
    return averages


@torch.no_grad()
def distance(
    tensors: Sequence[Tensor], averages: Sequence[Tensor], collectives: Collectives
) -> float:
    """Return the root mean square over ranks of the Euclidean distance ||z_i - average||.

    Of sharded replicas z_i is the whole of one, over replicas.
    """
    squares = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for tensor, mean in zip(tensors, averages, strict=True):
        squares += (tensor.double() - mean).square().sum()
    collectives.all_reduce_(squares)
    if (replica := collectives.run.replica) is not None:
        squares.fill_(sum(row[0] for row in gather(replica, [float(squares)])))
    return float((squares / collectives.size).sqrt())


@contextmanager
def assigned(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Write values into tensors inside the context; restore the tensors after it."""
    own = [tensor.clone() for tensor in tensors]
    try:
        copy_all(tensors, values)
        yield
    finally:
        copy_all(tensors, own)


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in place."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
