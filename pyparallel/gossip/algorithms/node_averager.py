"""Hierarchical gossip on one rank: each rank of a node gossips its shard of the parameters."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from typing_extensions import override

from ...comm import (
    ANY,
    Collectives,
    FlatBuckets,
    MessageHeaders,
    ModelAverager,
    NonFiniteError,
    WrappedAverager,
    raising_peer_errors,
)
from ...comm.model_averager import NOTIFYING


class NodeAverager(WrappedAverager):
    """All-reduce of gradients within a node, and an inner algorithm between nodes on shards.

    All ranks of a node take the same inner steps, each with its shard: their weights are equal, and
    either all shards change or none. The node gathers the shards when they have changed.

    Args:
        inner: averages this rank's shard with the ranks of equal local rank in other nodes.
        within: averages the gradients of the node during backward.
        buckets: all parameters.
        shards: of all ranks of the node.
        node_group: the ranks of the node.
        process_group: the ranks that train together; None: the default group.
    """

    can_be_inner = False

    def __init__(
        self,
        inner: ModelAverager,
        within: ModelAverager,
        buckets: FlatBuckets,
        shards: Sequence[FlatBuckets],
        node_group: ProcessGroup,
        process_group: ProcessGroup | None,
    ) -> None:
        super().__init__(inner, buckets.buffers, process_group)
        self._within = within
        self._buckets = buckets
        self._shards = shards
        self._node_group = node_group
        self._node = Collectives(node_group)
        self._headers = MessageHeaders(self._node.rank, self._node.size, node_group)
        self._local_rank = dist.get_rank(node_group)
        self._own_shard = shards[self._local_rank]
        self._other_shards = [
            s for local_rank, s in enumerate(shards) if local_rank != self._local_rank
        ]
        self._other_shards_hold_numerator = False

    @property
    @override
    def bytes_sent(self) -> int:
        """Bytes sent for gradients within the node, to other nodes, and to gather shards."""
        return self._within.bytes_sent + super().bytes_sent

    @property
    @override
    def waiting_seconds(self) -> float:
        own = super().waiting_seconds + self._node.stats.waiting_seconds
        return self._within.waiting_seconds + own

    @override
    def wrap(self, module: nn.Module) -> Callable[..., Any]:
        def forward(*inputs: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and self.synchronizes:
                # Here, before another rank could block in backward.
                with raising_peer_errors(self.process_group, self.counts.steps, NOTIFYING):
                    work = Join.notify_join_context(self)
                    if work is not None:
                        work.wait()
                if work is not None:
                    self.raise_if_any_ran_out(ran_out=False)
            self._within.counts = self.counts
            return self._within.wrap(module)(*inputs, **kwargs)

        return forward

    @override
    def restore_debiased(self) -> None:
        self.inner.restore_debiased()
        self._debias_other_shards()

    @override
    def before_step(self) -> None:
        if not self.synchronizes:
            raise RuntimeError(
                "optimizer.step() must be called outside of no_sync() with Hierarchical, got a "
                "call inside: the ranks of a node would diverge"
            )
        with self._gather_if_changed():
            self.inner.before_step()

    @override
    @torch.no_grad()
    def before_update(self) -> None:
        """Turn all shards into x = w * z if the inner algorithm does so with this rank's shard."""
        before = self._version()
        self.inner.before_update()
        if self._version() != before:
            self._other_shards_hold_numerator = True
            for buffer in self._buffers_of_other_shards():
                buffer.mul_(self.weight)

    @override
    def after_update(self) -> None:
        self.inner.after_update()
        self._debias_other_shards()

    @override
    def after_step(self) -> None:
        """Count the bytes that backward has sent, and communicate between nodes."""
        self._within.after_step()
        with self._gather_if_changed():
            self.inner.after_step()

    @override
    def flush(self) -> None:
        with self._gather_if_changed():
            self.inner.flush()

    @override
    @torch.no_grad()
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return all shards and the weight with messages in flight merged."""
        merged, weight = self.inner.as_merged()
        live = [buffer.data_ptr() for buffer in self._own_shard.buffers]
        if [buffer.data_ptr() for buffer in merged] == live:
            return self.buffers, weight
        copied = copy.copy(self._buckets)
        copied.buffers = [buffer.clone() for buffer in self.buffers]
        shards = make_shards(copied, len(self._shards))
        for target, source in zip(shards[self._local_rank].buffers, merged, strict=True):
            target.copy_(source)
        self._gather(shards)
        return copied.buffers, weight

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on the rank."""
        with self._within.no_sync(), super().no_sync():
            yield

    @override
    def close(self) -> None:
        """Free DistributedDataParallel."""
        self._within.close()

    @override
    def notify_joined_ranks(self) -> None:
        """Do nothing: forward has notified."""

    @override
    def shadow_step(self) -> None:
        """Raise an error on all ranks: this one has no batches left."""
        self.raise_if_any_ran_out(ran_out=True)

    def raise_if_any_ran_out(self, ran_out: bool) -> None:
        """Raise on all ranks if one has run out of batches while others train."""
        num_without = torch.full((), float(ran_out), device=self.join_device)
        collectives = Collectives(self.process_group)
        collectives.step = self.counts.steps
        collectives.all_reduce_(num_without)
        if num_without.item():
            raise ValueError(
                "join() must be given equal numbers of batches on all ranks with Hierarchical, got "
                f"{int(num_without)} without any while others still train: a rank without batches "
                "cannot contribute its shard; drop the last batches of the others"
            )

    @contextmanager
    def _gather_if_changed(self) -> Iterator[None]:
        """Gather the shards if this rank's shard changes inside the context."""
        before, failure = self._version(), None
        try:
            yield
        except NonFiniteError as error:  # the round is complete
            failure = error
        if self._version() != before:
            self._headers.counts = self.counts
            self._node.step = self.counts.steps
            self._headers.gather(self._node, ANY, self.join_device)
            self._gather(self._shards)
            self._bytes_sent += self._own_shard.num_bytes * len(self._other_shards)
            self._headers.raise_nonfinite()
        if failure is not None:
            raise failure

    def _version(self) -> int:
        # Torch counts in-place writes. Those of the optimizer are not in this count: a parameter
        # has its own.
        return sum(buffer._version for buffer in self._own_shard.buffers)

    @torch.no_grad()
    def _gather(self, shards: Sequence[FlatBuckets]) -> None:
        what = "the broadcast of the shards of a node failed"
        with (
            torch.profiler.record_function("pyparallel::gather_node"),
            raising_peer_errors(self._node_group, self.counts.steps, what),
        ):
            works = [
                dist.broadcast(buffer, group=self._node_group, group_src=local_rank, async_op=True)
                for local_rank, shard in enumerate(shards)
                for buffer in shard.buffers
            ]
            begin = time.perf_counter()
            for work in works:
                work.wait()
            self._waiting_seconds += time.perf_counter() - begin

    def _buffers_of_other_shards(self) -> Iterator[Tensor]:
        return (buffer for shard in self._other_shards for buffer in shard.buffers)

    @torch.no_grad()
    def _debias_other_shards(self) -> None:
        if self._other_shards_hold_numerator:
            self._other_shards_hold_numerator = False
            for buffer in self._buffers_of_other_shards():
                buffer.div_(self.weight)


def make_shards(buckets: FlatBuckets, num_shards: int) -> list[FlatBuckets]:
    """Split a model's flat buffers into one shard for each rank of a node."""
    return [buckets.shard(local_rank, num_shards) for local_rank in range(num_shards)]
