"""Rounds between nodes: each rank of a node gossips its shard of the parameters."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from ...comm import FlatBuckets
from .rounds import Rounds


class NodeRounds(Rounds):
    """Rounds of one shard of the parameters, with a gather of all shards within the node.

    All ranks of a node take the same rounds, each with its shard: their weights are equal, and
    either all shards change or none.
    """

    def __init__(
        self,
        inner: Rounds,
        buckets: FlatBuckets,
        shards: Sequence[FlatBuckets],
        node_group: ProcessGroup,
    ) -> None:
        self._inner = inner
        self._buckets = buckets
        self._shards = shards
        self._group = node_group
        self._local_rank = dist.get_rank(node_group)
        self._own_shard = shards[self._local_rank]
        self._other_shards = [
            s for local_rank, s in enumerate(shards) if local_rank != self._local_rank
        ]
        self._other_shards_hold_numerator = False
        self._bytes_gathered = 0

    @property
    @override
    def weight(self) -> Tensor:
        """The push-sum weight of the node, 0-d float64."""
        return self._inner.weight

    @property
    @override
    def bytes_sent(self) -> int:
        """Bytes sent to other nodes and to gather shards."""
        return self._inner.bytes_sent + self._bytes_gathered

    @override
    def closure_error(self) -> str | None:
        return self._inner.closure_error()

    @override
    def restore_debiased(self) -> None:
        self._inner.restore_debiased()
        self._debias_other_shards()

    @override
    def begin(self) -> None:
        with self._gather_if_changed():
            self._inner.begin()

    @override
    @torch.no_grad()
    def enter_update(self) -> None:
        """Turn all shards into x = w * z if the inner rounds do so with this rank's shard."""
        before = self._version()
        self._inner.enter_update()
        if self._version() != before:
            self._other_shards_hold_numerator = True
            for buffer in self._buffers_of_other_shards():
                buffer.mul_(self.weight)

    @override
    def leave_update(self) -> None:
        self._inner.leave_update()
        self._debias_other_shards()

    @override
    def end(self) -> None:
        with self._gather_if_changed():
            self._inner.end()

    @override
    def flush(self) -> None:
        with self._gather_if_changed():
            self._inner.flush()

    @override
    @torch.no_grad()
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """Return all shards and the weight with messages in flight merged."""
        merged, weight = self._inner.as_merged()
        live = [buffer.data_ptr() for buffer in self._own_shard.buffers]
        if [buffer.data_ptr() for buffer in merged] == live:
            return self._buckets.buffers, weight
        copied = copy.copy(self._buckets)
        copied.buffers = [buffer.clone() for buffer in self._buckets.buffers]
        shards = make_shards(copied, len(self._shards))
        for target, source in zip(shards[self._local_rank].buffers, merged, strict=True):
            target.copy_(source)
        self._gather(shards)
        return copied.buffers, weight

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner rounds, of this rank's shard."""
        return self._inner.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)

    @override
    def restart(self) -> None:
        self._inner.restart()

    @contextmanager
    def _gather_if_changed(self) -> Iterator[None]:
        """Gather the shards if this rank's shard changes inside the context."""
        before = self._version()
        yield
        if self._version() != before:
            self._gather(self._shards)
            self._bytes_gathered += self._own_shard.num_bytes * len(self._other_shards)

    def _version(self) -> int:
        # Torch counts in-place writes. Those of the optimizer are not in this count: a parameter
        # has its own.
        return sum(buffer._version for buffer in self._own_shard.buffers)

    @torch.no_grad()
    def _gather(self, shards: Sequence[FlatBuckets]) -> None:
        with torch.profiler.record_function("pyparallel::gather_node"):
            works = [
                dist.broadcast(buffer, group=self._group, group_src=local_rank, async_op=True)
                for local_rank, shard in enumerate(shards)
                for buffer in shard.buffers
            ]
            for work in works:
                work.wait()

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
