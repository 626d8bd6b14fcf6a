"""What all ranks do together outside of rounds: compare their steps, and average exactly."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Collectives, StepCounts


def check_equal_steps(
    counts: StepCounts, device: torch.device, process_group: dist.ProcessGroup | None
) -> None:
    """Raise on all ranks if their optimizers have taken other steps; before waiting for messages.

    Args:
        counts: this rank's.
        device: where the group communicates.
        process_group: None means the default group.

    Raises:
        RuntimeError: a rank has skipped or repeated a step; names two ranks that differ.
    """
    collectives = Collectives(process_group)
    if collectives.size == 1:
        return
    own = torch.tensor([counts.steps, counts.repeats], dtype=torch.float64, device=device)
    rows = collectives.all_gather(own).tolist()
    others = (rank for rank, row in enumerate(rows) if row != rows[0])
    if (other := next(others, None)) is not None:
        texts = [
            f"{steps:.0f} on rank {rank} ({repeats:.0f} without a forward since the step before)"
            for rank, (steps, repeats) in ((0, rows[0]), (other, rows[other]))
        ]
        raise RuntimeError(
            f"all ranks must have taken the same steps, got {' and '.join(texts)}: one was skipped "
            "or repeated, and messages of it may never arrive; use join() for unequal numbers of "
            "batches, and resume from a checkpoint"
        )


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
    collectives = Collectives(process_group)
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
    tensors: Sequence[Tensor], weight: Tensor, process_group: dist.ProcessGroup | None
) -> float:
    """Return the root mean square over ranks of the Euclidean distance ||z_i - average||."""
    averages = average(tensors, weight, process_group)
    squares = torch.zeros_like(weight)
    for tensor, mean in zip(tensors, averages, strict=True):
        squares += (tensor.double() - mean).square().sum()
    collectives = Collectives(process_group)
    collectives.all_reduce_(squares)
    return float((squares / collectives.size).sqrt())
