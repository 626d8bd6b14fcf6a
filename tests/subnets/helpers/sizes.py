"""Groups of several sizes in one set of processes, whose start takes longer than their work."""

import datetime
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from tests.workers import run_ranks, store_barrier

TIMEOUT = datetime.timedelta(seconds=60)


def run_sizes(sizes: Sequence[int], function: Callable[[int], Any]) -> dict[int, list[Any]]:
    """Return by size what function(rank) returns on each rank of a gloo group of this size."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(max(sizes), _run_rank, tuple(sizes), function, folder)
    return {size: [by_size[size] for by_size in found[:size]] for size in sizes}


def _run_rank(rank, sizes, function, folder):
    found = {}
    for size in sorted(sizes, reverse=True):
        if rank < size:
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/{size}",
                rank=rank,
                world_size=size,
                timeout=TIMEOUT,
            )
            store_barrier()  # a rank without further sizes must not exit while others connect
            found[size] = function(rank)
    return found
