"""The exact average over all ranks, and the ranks' distance from it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def average(
    tensors: Sequence[Tensor], weight: Tensor, process_group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Return the average sum_i w_i z_i / sum_i w_i of each tensor over all ranks, in float64.

    Args:
        tensors: z: floating-point tensors, of equal shapes on all ranks.
        weight: w: 0-d float64, this rank's push-sum weight.
        process_group: None means the default group.
    """
    total = weight.clone()
    dist.all_reduce(total, group=process_group)
    averages = []
    for tensor in tensors:
        wide = tensor.double() * weight
        dist.all_reduce(wide, group=process_group)
        averages.append(wide.div_(total))
    return averages


@torch.no_grad()
def distance(
    tensors: Sequence[Tensor], weight: Tensor, process_group: dist.ProcessGroup | None
) -> float:
    """Return the root mean square over ranks of the Euclidean distance ||z_i - average||."""
    averages = average(tensors, weight, process_group)
    squares = torch.zeros_like(weight)
    for tensor, mean in zip(tensors, averages, strict=True):
        squares += (tensor.double() - mean).square().sum()
    dist.all_reduce(squares, group=process_group)
    return float((squares / dist.get_world_size(process_group)).sqrt())
