"""Measurement of the link between ranks."""

import statistics

import torch
import torch.distributed as dist

from .model import Link
from .profile import timed

_LARGE, _SMALL = 2**23, 1  # float32 elements: 32 MiB and 4 bytes
_WARM_UP = 2
_REPEATS = 7


def measure_link(device: torch.device) -> Link:
    """Measure the link by a large and a small all-reduce; the same result on all ranks."""
    num_ranks = dist.get_world_size()
    large, small = (_time_all_reduce(numel, device) for numel in (_LARGE, _SMALL))
    num_bytes = 2 * (num_ranks - 1) / num_ranks * 4 * _LARGE
    return Link(num_bytes / max(large - small, 1e-9), small, num_ranks)


def _time_all_reduce(numel: int, device: torch.device) -> float:
    tensor = torch.zeros(numel, device=device)
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        dist.barrier()
        times.append(timed(lambda: dist.all_reduce(tensor), device))
    return max_over_ranks([statistics.median(times[_WARM_UP:])], device)[0]


def max_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return the elementwise maximum over ranks; all ranks must call it."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(each) for each in tensor]
