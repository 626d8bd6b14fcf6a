"""Hierarchical gossip: all-reduce within a node, gossip between nodes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, JoinHook
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import FlatBuckets, counterparts_of, new_group, node_of
from .all_reduce import AllReduce, AllReduceSession
from .base import Algorithm
from .node_rounds import NodeRounds, make_shards
from .rounds import GossipSession, inner_rounds


@dataclass(frozen=True)
class Hierarchical(Algorithm):
    """All-reduce of gradients within a node, gossip between nodes.

    The setting of the experiments of Assran et al. (ICML 2019, arXiv 1811.10792): the ranks of a
    node average their gradients and so stay bitwise equal; for the inner algorithm each node is
    one rank. DistributedDataParallel averages the gradients during backward, so clipping sees the
    node's average.

    Each rank of a node gossips its own shard of the parameters with the ranks of equal local rank
    in other nodes, and the node gathers the shards when they have changed. With M bytes of
    parameters, r ranks per node and d messages per round, a step sends per rank d M / r to other
    nodes (d M per node, over all its links) and, within the node, (r - 1) / r M for the shards and
    2 (r - 1) / r M for the gradients.

    With one rank per node it is the inner algorithm. A step inside ``no_sync()`` is an error, as
    the ranks of a node would diverge. So are unequal numbers of batches in ``join()``: a rank
    without batches cannot contribute its shard.

    Args:
        inner: a gossip algorithm for as many ranks as there are nodes, such as
            ``SGP(topology.OnePeerExponential(num_nodes), overlap=1)``.
        ranks_per_node: consecutive ranks form a node; must divide the number of ranks.
        within: how a node averages its gradients.
    """

    inner: Algorithm
    ranks_per_node: int
    within: AllReduce = field(default_factory=AllReduce)

    def __post_init__(self) -> None:
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ValueError(
                f"ranks_per_node must be a positive number of ranks, got {self.ranks_per_node!r}"
            )

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        return [("algorithm", repr(self)), *self.inner.config_fields()]

    @override
    def validation_error(self, num_ranks: int) -> str | None:
        num_nodes, remainder = divmod(num_ranks, self.ranks_per_node)
        if remainder:
            return (
                f"ranks_per_node must divide the process group's {num_ranks} ranks, got "
                f"{self.ranks_per_node}"
            )
        error_text = self.inner.validation_error(num_nodes)
        return error_text and f"inner must be for {num_nodes} nodes as its ranks: {error_text}"

    @override
    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Start DistributedDataParallel within the node and the inner algorithm between nodes.

        Raises:
            ValueError: the inner algorithm does not gossip, or the model is too small to shard.
        """
        if self.ranks_per_node == 1:
            session = self.inner.start(module, optimizer, buckets, process_group)
            return GossipSession(module, inner_rounds(session, self.inner), process_group)
        shards = make_shards(buckets, self.ranks_per_node)
        if not all(shard.buffers for shard in shards):
            raise ValueError(
                "ranks_per_node must leave each rank a shard of the parameters, got "
                f"{self.ranks_per_node} for {buckets.num_bytes} bytes"
            )
        rank, num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        node = node_of(rank, self.ranks_per_node)
        node_group = new_group(node, process_group)
        peers = new_group(counterparts_of(rank, self.ranks_per_node, num_ranks), process_group)
        inner = self.inner.start(module, optimizer, shards[rank - node[0]], peers)
        rounds = NodeRounds(inner_rounds(inner, self.inner), buckets, shards, node_group)
        within = self.within.start(module, optimizer, buckets, node_group)
        return HierarchicalSession(module, within, rounds, process_group)


class HierarchicalSession(GossipSession):
    """A session that averages gradients within the node during backward."""

    def __init__(
        self,
        module: nn.Module,
        within: AllReduceSession,
        rounds: NodeRounds,
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(module, rounds, group)
        self._within = within

    @property
    @override
    def bytes_sent(self) -> int:
        """Bytes sent for gradients within the node and by the rounds."""
        return self._within.bytes_sent + self.rounds.bytes_sent

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; backward averages the gradients of the node."""
        self.rounds.restore_debiased()
        if torch.is_grad_enabled() and not self._postponed:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait()
                self.raise_if_any_ran_out(ran_out=False)
        return self._within.forward(*inputs, **kwargs)

    @override
    def before_step(self, *, has_closure: bool) -> None:
        if self._postponed:
            raise RuntimeError(
                "optimizer.step() must be called outside of no_sync() with Hierarchical, got a "
                "call inside: the ranks of a node would diverge"
            )
        super().before_step(has_closure=has_closure)

    @override
    def after_step(self) -> None:
        """Count the bytes that backward has sent, and communicate between nodes."""
        self._within.after_step()
        super().after_step()

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
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a hook that makes all ranks raise an error once this one has no batches left."""
        return _ReportNoBatches(self)

    def raise_if_any_ran_out(self, ran_out: bool) -> None:
        """Raise on all ranks if one has run out of batches while others train."""
        num_without = torch.full((), float(ran_out), device=self.join_device)
        dist.all_reduce(num_without, group=self._group)
        if num_without.item():
            raise ValueError(
                "join() must be given equal numbers of batches on all ranks with Hierarchical, got "
                f"{int(num_without)} without any while others still train: a rank without batches "
                "cannot contribute its shard; drop the last batches of the others"
            )

    @override
    def _notify_joined_ranks(self) -> None:
        """Do nothing: forward has notified, before another rank could block in backward."""


class _ReportNoBatches(JoinHook):
    def __init__(self, session: HierarchicalSession) -> None:
        self._session = session

    @override
    def main_hook(self) -> None:
        self._session.raise_if_any_ran_out(ran_out=True)
