"""The baseline: averaging gradients with everyone, by torch's own DistributedDataParallel."""

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

from ...comm import FlatBuckets

# Statistics stay local until consensus(), as in gossip. Torch 2.13 renamed the argument.
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_LOCAL_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in _DDP_ARGUMENTS
    else "broadcast_buffers": False
}


@dataclass(frozen=True)
class AllReduce:
    """Exact data parallelism: gradients are averaged over all ranks during backward.

    The averaging is ``torch.nn.parallel.DistributedDataParallel``, unchanged: the peer that gossip
    is compared with is the one people use.

    Args:
        find_unused_parameters: as in DistributedDataParallel.
    """

    find_unused_parameters: bool = False

    def config_fields(self) -> list[tuple[str, str]]:
        """The algorithm with its option."""
        return [("algorithm", repr(self))]

    def validation_error(self, num_ranks: int) -> str | None:
        """None: it runs on any number of ranks."""
        return None

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: dist.ProcessGroup | None,
    ) -> "AllReduceSession":
        """Hand the module over to DistributedDataParallel."""
        replica = DistributedDataParallel(
            module,
            process_group=process_group,
            find_unused_parameters=self.find_unused_parameters,
            init_sync=False,  # GossipDataParallel has made parameters and buffers equal
            **_LOCAL_BUFFERS,
        )
        return AllReduceSession(replica, buckets, process_group)


class AllReduceSession:
    """DistributedDataParallel on one rank, seen as a session."""

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
        """By the formula of a ring all-reduce: each rank sends 2 (n - 1) / n of the gradients."""
        self.weight = torch.ones((), dtype=torch.float64, device=buckets.buffers[0].device)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; backward will average the gradients."""
        return self._replica(*inputs, **kwargs)

    def settle(self) -> None:
        """Nothing: an interrupted step leaves no trace here."""

    def before_step(self, *, has_closure: bool) -> None:
        """Nothing: the gradients are averaged already."""

    def after_step(self) -> None:
        """Count what the backward before this step has sent."""
        if self._synchronizes:
            self.bytes_sent += self._bytes_per_step

    def flush(self) -> None:
        """Nothing: the gradients have arrived when backward returns."""

    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """The parameters as they are."""
        return self._buffers, self.weight

    def state_dict(self) -> dict[str, Any]:
        """Nothing: gradients do not outlive their step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def restart(self) -> None:
        """Nothing."""

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
        """Free DistributedDataParallel, whose C++ reducer holds the process group too.

        The group ends with its last reference. That must be Python's, which alone waits for the
        group's threads without Python's lock; they may need it (see ``comm.process_groups``).
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
