"""The baseline: all-reduce of gradients by torch's DistributedDataParallel."""

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import FlatBuckets
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
    def config_fields(self) -> list[tuple[str, str]]:
        return [("algorithm", repr(self))]

    @override
    def validation_error(self, num_ranks: int) -> str | None:
        return None

    @override
    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: dist.ProcessGroup | None,
    ) -> "AllReduceSession":
        """Wrap the module in DistributedDataParallel."""
        replica = DistributedDataParallel(
            module,
            process_group=process_group,
            find_unused_parameters=self.find_unused_parameters,
            init_sync=False,  # GossipDataParallel has broadcast parameters and buffers
            **_LOCAL_BUFFERS,
        )
        return AllReduceSession(replica, buckets, process_group)


class AllReduceSession:
    """A session that runs DistributedDataParallel."""

    def __init__(
        self,
        replica: DistributedDataParallel,
        buckets: FlatBuckets,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._running: DistributedDataParallel | None = replica
        self._synchronizes = True
        self._buffers = buckets.buffers
        num_ranks = dist.get_world_size(process_group)
        self._bytes_per_step = 2 * buckets.num_bytes * (num_ranks - 1) // num_ranks
        self.bytes_sent = 0
        """Computed for a ring all-reduce: each rank sends 2 (n - 1) / n of the gradients."""
        self.weight = torch.ones((), dtype=torch.float64, device=buckets.buffers[0].device)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; backward averages the gradients."""
        return self._replica(*inputs, **kwargs)

    def restore_debiased(self) -> None:
        """Do nothing: parameters are always de-biased."""

    def before_step(self, *, has_closure: bool) -> None:
        """Do nothing: backward has averaged the gradients."""

    def after_step(self) -> None:
        """Count the bytes that the last backward has sent."""
        if self._synchronizes:
            self.bytes_sent += self._bytes_per_step

    def flush(self) -> None:
        """Do nothing: communication is complete when backward returns."""

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return the live parameters and the weight 1."""
        return self._buffers, self.weight

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: nothing is kept between steps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is empty."""

    def restart(self) -> None:
        """Do nothing: nothing is kept between steps."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, as DistributedDataParallel does."""
        before, self._synchronizes = self._synchronizes, False
        try:
            with self._replica.no_sync():
                yield
        finally:
            self._synchronizes = before

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
    def _replica(self) -> DistributedDataParallel:
        if self._running is None:
            raise RuntimeError("AllReduceSession must not be used after close()")
        return self._running

    @property
    def joinable(self) -> Joinable:
        """The DistributedDataParallel module."""
        return self._replica
