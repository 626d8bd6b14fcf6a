"""The baseline: all-reduce of gradients by torch's DistributedDataParallel."""

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import FlatBuckets, ModelAverager
from .base import Algorithm

# Statistics stay local until consensus(), as in gossip. Torch 2.13 renamed the argument.
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_LOCAL_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in _DDP_ARGUMENTS
    else "broadcast_buffers": False
}


@dataclass(frozen=True)
class AllReduce(Algorithm):
    """Exact data parallelism: gradients are averaged over all ranks during backward.

    It runs ``torch.nn.parallel.DistributedDataParallel`` unchanged, as the baseline for gossip.

    Args:
        find_unused_parameters: as in DistributedDataParallel.
    """

    find_unused_parameters: bool = False

    @override
    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: dist.ProcessGroup | None,
    ) -> "AllReduceAverager":
        """Wrap the module in DistributedDataParallel."""
        replica = DistributedDataParallel(
            module,
            process_group=process_group,
            find_unused_parameters=self.find_unused_parameters,
            init_sync=False,  # GossipDataParallel has broadcast parameters and buffers
            **_LOCAL_BUFFERS,
        )
        return AllReduceAverager(replica, buckets, process_group)


class AllReduceAverager(ModelAverager):
    """DistributedDataParallel on one rank: backward averages the gradients."""

    can_be_inner = False
    has_equal_parameters = True

    def __init__(
        self,
        replica: DistributedDataParallel,
        buckets: FlatBuckets,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(buckets.buffers, process_group)
        self._running: DistributedDataParallel | None = replica
        num_ranks = dist.get_world_size(process_group)
        # Computed for a ring all-reduce: each rank sends 2 (n - 1) / n of the gradients.
        self._bytes_per_step = 2 * buckets.num_bytes * (num_ranks - 1) // num_ranks

    @override
    def wrap(self, module: nn.Module) -> Callable[..., Any]:
        return self._replica

    @override
    def after_step(self) -> None:
        """Count the bytes that the last backward has sent."""
        self._bytes_sent += self._bytes_per_step

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, as DistributedDataParallel does."""
        with super().no_sync(), self._replica.no_sync():
            yield

    @override
    def close(self) -> None:
        """Free DistributedDataParallel, whose C++ reducer also references the process group.

        The group is destroyed with its last reference. That must be a Python one: only then does
        the destructor wait for the group's threads without holding the GIL, which they may need
        (see ``comm.process_groups``).
        """
        group = self._replica.process_group
        self._running = None
        gc.collect()
        del group

    @property
    @override
    def joinable(self) -> Joinable:
        """The DistributedDataParallel module."""
        return self._replica

    @property
    def _replica(self) -> DistributedDataParallel:
        if self._running is None:
            raise RuntimeError("AllReduceAverager must not be used after close()")
        return self._running
