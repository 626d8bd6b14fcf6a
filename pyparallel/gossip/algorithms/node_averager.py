"""Hierarchical gossip on one rank: each rank of a node gossips its shard of the parameters."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import ANY, Collectives, NonFiniteError, Run
from ...comm.profiling import profiled
from ...training import FlatBuckets, ModelAverager, Traits
from ...training.step_hook import decays_only
from ..messages import MessageHeaders
from ..push_sum.buffer import Numerator


class NodeAverager(ModelAverager):
    """All-reduce of gradients within a node, and an inner algorithm between nodes on shards.

    All ranks of a node take the same inner steps, each with its shard: their weights are equal, and
    either all shards change or none. The node gathers the shards when they have changed.

    ``inner`` averages this rank's shard with the ranks of equal local rank in other nodes,
    ``within`` the node's gradients during backward.
    """

    traits = Traits(has_equal_batches=True)
    inner: ModelAverager

    def __init__(
        self,
        inner: ModelAverager,
        within: ModelAverager,
        buckets: FlatBuckets,
        shards: Sequence[FlatBuckets],
        node_run: Run,
        run: Run,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(buckets.buffers, run, inner)
        self._within = within
        self._buckets = buckets
        self._shards = shards
        self._node = Collectives(node_run, run.stats)
        self._headers = MessageHeaders(node_run)
        self._local_rank = node_run.group_rank
        self._own_shard = shards[self._local_rank]
        self._other_shards = [
            s for local_rank, s in enumerate(shards) if local_rank != self._local_rank
        ]
        others = [buffer for shard in self._other_shards for buffer in shard.buffers]
        self._others = Numerator(others)
        self._keeps_values = not decays_only(optimizer)

    @override
    def wrap(self, module: nn.Module) -> Callable[..., Any]:
        return self._within.wrap(module)

    @override
    def restore_debiased(self) -> None:
        self.inner.restore_debiased()
        self._others.pause(self.status.weight)

    @override
    def before_step(self) -> None:
        if not self.run.counts.synchronizes:
            raise RuntimeError(
                "optimizer.step() must be called outside of no_sync() with Hierarchical, got a "
                "call inside: the ranks of a node would diverge"
            )
        self._others.end()  # of a step that was interrupted
        with self._gather_if_changed():
            self.inner.before_step()

    @override
    def before_update(self) -> None:
        """Step on x = w * z of all shards if the inner algorithm does so with this rank's shard."""
        self.inner.before_update()
        if self.status.steps_numerator:
            self._others.begin(self.status.weight, keeps_values=self._keeps_values)

    @override
    def after_update(self) -> None:
        self.inner.after_update()
        self._others.pause(self.status.weight)
        self._others.end()

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
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        return self._of_node(*self.inner.as_merged())

    @override
    def as_evaluated(self) -> tuple[list[Tensor], Tensor]:
        return self._of_node(*self.inner.as_evaluated())

    @torch.no_grad()
    def _of_node(self, merged: list[Tensor], weight: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the buffers of the node, of whose shards these are this rank's."""
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
    def close(self) -> None:
        self._within.close()

    @contextmanager
    def _gather_if_changed(self) -> Iterator[None]:
        """Gather the shards if this rank's shard changes inside the context."""
        before, failure = self._version(), None
        try:
            yield
        except NonFiniteError as error:  # the round is complete
            failure = error
        if self._version() != before:
            self._headers.gather(self._node, ANY, self.buffers[0].device)
            self._gather(self._shards)
            self.run.stats.count_bytes(self._own_shard.num_bytes * len(self._other_shards))
            self._headers.raise_nonfinite()
        if failure is not None:
            raise failure

    def _version(self) -> int:
        # Torch counts in-place writes. Those of the optimizer are not in this count: a parameter
        # has its own.
        return sum(buffer._version for buffer in self._own_shard.buffers)

    @torch.no_grad()
    def _gather(self, shards: Sequence[FlatBuckets]) -> None:
        group = self._node.run.group
        what = "the broadcast of the shards of a node failed"
        with (
            profiled("pyparallel::gather_node"),
            self._node.run.raising(what),
        ):
            works = [
                dist.broadcast(buffer, group=group, group_src=local_rank, async_op=True)
                for local_rank, shard in enumerate(shards)
                for buffer in shard.buffers
            ]
            with self.run.waiting(self.run.stats):
                for work in works:
                    work.wait()


def node_of(rank: int, ranks_per_node: int) -> range:
    """Return the ranks of a rank's node, where consecutive ranks share one."""
    first = rank - rank % ranks_per_node
    return range(first, first + ranks_per_node)


def counterparts_of(rank: int, ranks_per_node: int, num_ranks: int) -> range:
    """Return the ranks with the same local rank on every node."""
    return range(rank % ranks_per_node, num_ranks, ranks_per_node)


def make_shards(buckets: FlatBuckets, num_shards: int) -> list[FlatBuckets]:
    """Split a model's flat buffers into one shard for each rank of a node."""
    return [buckets.shard(local_rank, num_shards) for local_rank in range(num_shards)]


def find_ranks_per_node_error(ranks_per_node: int, num_ranks: int) -> str | None:
    """Return why ranks cannot form nodes of equal size, or None."""
    if num_ranks % ranks_per_node == 0:
        return None
    rule = f"ranks_per_node must divide the process group's {num_ranks} ranks"
    return f"{rule}, got {ranks_per_node}"
