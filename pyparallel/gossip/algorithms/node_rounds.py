"""Rounds that the ranks of a node share: each takes its part of the parameters to other nodes."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...comm import FlatBuckets
from .rounds import Rounds


class NodeRounds:
    """Rounds of one part of the parameters, and the gathering of all parts within the node.

    All ranks of a node take the same rounds, each with its part: their weights are equal, and a
    part changes on all of them or on none.
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
        self._place = dist.get_rank(node_group)
        self._mine = shards[self._place]
        self._others = [s for place, s in enumerate(shards) if place != self._place]
        self._others_hold_numerator = False
        self._bytes_gathered = 0

    @property
    def weight(self) -> Tensor:
        """That of the inner rounds: the node's mass."""
        return self._inner.weight

    @property
    def bytes_sent(self) -> int:
        """To other nodes, and for gathering."""
        return self._inner.bytes_sent + self._bytes_gathered

    def closure_error(self) -> str | None:
        """As the inner rounds say."""
        return self._inner.closure_error()

    def settle(self) -> None:
        """As the inner rounds do, in all parts."""
        self._inner.settle()
        self._debias_others()

    def begin(self) -> None:
        """As the inner rounds do, and gather what has arrived."""
        with self._gathers():
            self._inner.begin()

    @torch.no_grad()
    def enter_update(self) -> None:
        """Make x = w * z of all parts, where the inner rounds make it of this one."""
        before = self._version()
        self._inner.enter_update()
        if self._version() != before:
            self._others_hold_numerator = True
            for buffer in self._buffers_of_others():
                buffer.mul_(self.weight)

    def leave_update(self) -> None:
        """De-bias all parts."""
        self._inner.leave_update()
        self._debias_others()

    def end(self) -> None:
        """As the inner rounds do, and gather what has changed."""
        with self._gathers():
            self._inner.end()

    def flush(self) -> None:
        """As the inner rounds do, and gather what has arrived."""
        with self._gathers():
            self._inner.flush()

    @torch.no_grad()
    def as_merged(self) -> tuple[list[Tensor], Tensor]:
        """All parts with what travels counted in."""
        merged, weight = self._inner.as_merged()
        live = [buffer.data_ptr() for buffer in self._mine.buffers]
        if [buffer.data_ptr() for buffer in merged] == live:
            return self._buckets.buffers, weight
        whole = copy.copy(self._buckets)
        whole.buffers = [buffer.clone() for buffer in self._buckets.buffers]
        shards = divide(whole, len(self._shards))
        for target, source in zip(shards[self._place].buffers, merged, strict=True):
            target.copy_(source)
        self._gather(shards)
        return whole.buffers, weight

    def state_dict(self) -> dict[str, Any]:
        """That of the inner rounds: of this rank's part."""
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Likewise."""
        self._inner.load_state_dict(state)

    def restart(self) -> None:
        """As the inner rounds do."""
        self._inner.restart()

    @contextmanager
    def _gathers(self) -> Iterator[None]:
        """Gather the parts if they have changed inside."""
        before = self._version()
        yield
        if self._version() != before:
            self._gather(self._shards)
            self._bytes_gathered += self._mine.num_bytes * len(self._others)

    def _version(self) -> int:
        # Torch counts what is written in place. It does not count the optimizer's writes here: a
        # parameter keeps a count of its own.
        return sum(buffer._version for buffer in self._mine.buffers)

    @torch.no_grad()
    def _gather(self, shards: Sequence[FlatBuckets]) -> None:
        with torch.profiler.record_function("pyparallel::gather_node"):
            works = [
                dist.broadcast(buffer, group=self._group, group_src=place, async_op=True)
                for place, shard in enumerate(shards)
                for buffer in shard.buffers
            ]
            for work in works:
                work.wait()

    def _buffers_of_others(self) -> Iterator[Tensor]:
        return (buffer for shard in self._others for buffer in shard.buffers)

    @torch.no_grad()
    def _debias_others(self) -> None:
        if self._others_hold_numerator:
            self._others_hold_numerator = False
            for buffer in self._buffers_of_others():
                buffer.div_(self.weight)


def divide(buckets: FlatBuckets, num_shards: int) -> list[FlatBuckets]:
    """All parts of a model's buffers, one for each rank of a node."""
    return [buckets.shard(place, num_shards) for place in range(num_shards)]
