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

from ...comm import FlatBuckets, counterparts_of, new_group, node_of
from .all_reduce import AllReduce, AllReduceSession
from .base import Algorithm
from .node_rounds import NodeRounds, divide
from .rounds import GossipSession, rounds_alone


@dataclass(frozen=True)
class Hierarchical:
    """Nodes gossip as single ranks would, each with the gradient of all its ranks.

    The setting of the experiments of Assran et al. (ICML 2019, arXiv 1811.10792): the ranks of a
    node average their gradients and so stay equal to the last bit; nodes are what the inner
    algorithm knows as ranks. Gradients are averaged by DistributedDataParallel while backward
    runs, so that clipping sees the node's average.

    Each rank of a node gossips its own part of the parameters with the ranks of the same place in
    other nodes, and the node gathers the parts when they have changed. With M bytes of parameters,
    r ranks a node and d messages a round, a step sends per rank d M / r to other nodes (d M per
    node, over all its links) and, within the node, (r - 1) / r M for the parts and 2 (r - 1) / r M
    for the gradients.

    With one rank per node it is the inner algorithm. A step inside ``no_sync()`` is refused, as the
    node's ranks would part. So are unequal numbers of batches in ``join()``: who has none left
    cannot stand in for a part of its node.

    Args:
        inner: an algorithm of gossip for as many ranks as there are nodes, such as
            ``SGP(topology.OnePeerExponential(num_nodes), overlap=1)``.
        ranks_per_node: consecutive ranks form a node; divides the number of ranks.
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

    def config_fields(self) -> list[tuple[str, str]]:
        """The algorithm with its options, then what the inner one compares."""
        return [("algorithm", repr(self)), *self.inner.config_fields()]

    def validation_error(self, num_ranks: int) -> str | None:
        """Nodes that do not divide the ranks; what the inner algorithm finds with the nodes."""
        num_nodes, left = divmod(num_ranks, self.ranks_per_node)
        if left:
            return (
                f"ranks_per_node must divide the process group's {num_ranks} ranks, got "
                f"{self.ranks_per_node}"
            )
        problem = self.inner.validation_error(num_nodes)
        return problem and f"inner must be for {num_nodes} nodes as its ranks: {problem}"

    def start(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        buckets: FlatBuckets,
        process_group: ProcessGroup | None,
    ) -> GossipSession:
        """Begin within and between nodes, from parameters equal on all ranks.

        Raises:
            ValueError: an inner algorithm that does not gossip, or a model too small to divide.
        """
        if self.ranks_per_node == 1:
            session = self.inner.start(module, optimizer, buckets, process_group)
            return GossipSession(module, rounds_alone(session, self.inner), process_group)
        shards = divide(buckets, self.ranks_per_node)
        if not all(shard.buffers for shard in shards):
            raise ValueError(
                "ranks_per_node must leave each rank a part of the parameters, got "
                f"{self.ranks_per_node} for {buckets.num_bytes} bytes"
            )
        rank, num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        node = node_of(rank, self.ranks_per_node)
        node_group = new_group(node, process_group)
        peers = new_group(counterparts_of(rank, self.ranks_per_node, num_ranks), process_group)
        inner = self.inner.start(module, optimizer, shards[rank - node[0]], peers)
        rounds = NodeRounds(rounds_alone(inner, self.inner), buckets, shards, node_group)
        within = self.within.start(module, optimizer, buckets, node_group)
        return HierarchicalSession(module, within, rounds, process_group)


class HierarchicalSession(GossipSession):
    """A session whose module averages gradients within the node during backward."""

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
    def bytes_sent(self) -> int:
        """Gradients within the node, and what the rounds have sent."""
        return self._within.bytes_sent + self.rounds.bytes_sent

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; backward will average the gradients of the node."""
        self.rounds.settle()
        if torch.is_grad_enabled() and not self._postponed:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait()
                self.refuse_if_any(ran_out=False)
        return self._within.forward(*inputs, **kwargs)

    def before_step(self, *, has_closure: bool) -> None:
        """As in any session; refused where the gradients are not those of the node."""
        if self._postponed:
            raise RuntimeError(
                "optimizer.step() must come outside of no_sync() with Hierarchical, got one "
                "inside: the ranks of a node would part"
            )
        super().before_step(has_closure=has_closure)

    def after_step(self) -> None:
        """Count what backward has sent, and communicate between nodes."""
        self._within.after_step()
        super().after_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on the rank."""
        with self._within.no_sync(), super().no_sync():
            yield

    def close(self) -> None:
        """Free DistributedDataParallel."""
        self._within.close()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Tell the ranks that still train that one does not."""
        return _Refuse(self)

    def refuse_if_any(self, ran_out: bool) -> None:
        """Raise on all ranks if one has run out of batches while others train."""
        num_without = torch.full((), float(ran_out), device=self.join_device)
        dist.all_reduce(num_without, group=self._group)
        if num_without.item():
            raise ValueError(
                "join() must be given equal numbers of batches on all ranks with Hierarchical, got "
                f"{int(num_without)} without any while others still train: a rank without batches "
                "cannot stand in for a part of its node; leave out the last batches"
            )

    def _notify_joined_ranks(self) -> None:
        """Nothing after a step: forward has done it, before any rank could wait in backward."""


class _Refuse(JoinHook):
    def __init__(self, session: HierarchicalSession) -> None:
        self._session = session

    def main_hook(self) -> None:
        self._session.refuse_if_any(ran_out=True)
