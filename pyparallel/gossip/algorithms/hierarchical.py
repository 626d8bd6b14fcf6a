"""Hierarchical gossip: all-reduce within a node, gossip between nodes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ...comm import Run
from ...training import Algorithm, FlatBuckets, ModelAverager, Place, wrong_type
from ...training.arguments import check_integer, raise_problem, require
from . import node_averager
from .all_reduce import AllReduce
from .base import find_algorithm_error
from .sgp import sgp


def hierarchical(
    x: Tensor, w: Tensor, gradient: Callable[[Tensor], Tensor], mixing: Tensor, ranks_per_node: int
) -> tuple[Tensor, Tensor]:
    """Take a step of SGP between nodes, of which each is one rank; return x and w after it.

    Args:
        x: (nodes, d) numerators, equal on all ranks of a node.
        w: (nodes, 1) push-sum weights.
        gradient: lr times the gradients of all n ranks, (n, d), at their parameters, (n, d).
        mixing: (nodes, nodes) P.
        ranks_per_node: n / nodes.
    """

    def update(z: Tensor) -> Tensor:
        gradients = gradient(z.repeat_interleave(ranks_per_node, 0))
        nodes: Tensor = gradients.unflatten(0, (-1, ranks_per_node))
        return nodes.mean(1)  # all-reduce within each node

    return sgp(x, w, update, mixing)


@dataclass(frozen=True)
class Hierarchical(Algorithm):
    """All-reduce of gradients within a node, gossip between nodes.

    The setting of the experiments of Assran et al. (ICML 2019, arXiv 1811.10792): the ranks of a
    node average their gradients and so stay bitwise equal; for the inner algorithm each node is
    one rank. DistributedDataParallel averages the gradients during backward, so clipping sees the
    node's average.

    Each rank of a node gossips its own shard of the parameters with the ranks of equal local rank
    in other nodes, and the node gathers the shards when they have changed. With M bytes of
    parameters, r ranks per node and d messages per round, a rank sends d M / r to other nodes in a
    step: d M per node, over all its links. Within the node it sends (r - 1) / r M for the shards
    and 2 (r - 1) / r M for the gradients.

    With one rank per node it is the inner algorithm. A step inside ``no_sync()`` is an error, as
    the ranks of a node would diverge. So are unequal numbers of batches in ``join()``: a rank
    without batches cannot contribute its shard.

    Args:
        inner: a gossip algorithm between the nodes, such as ``SGP(overlap=1)``.
        ranks_per_node: consecutive ranks form a node; must divide the number of ranks.
    """

    can_be_inner = False
    refuses_shards = (
        "be the one between replicas for",
        ", whose ranks average gradients already: pass its inner one",
    )
    inner: Algorithm
    ranks_per_node: int
    within: AllReduce = field(default_factory=AllReduce)

    def __post_init__(self) -> None:
        raise_problem(find_algorithm_error(self.inner, "inner"))
        if not isinstance(self.within, AllReduce):
            raise wrong_type("within", "AllReduce()", self.within)
        check_integer("ranks_per_node", self.ranks_per_node, rule="a positive number of ranks")

    @override
    def bind(self, num_ranks: int) -> Self:
        num_nodes = max(1, num_ranks // self.ranks_per_node)  # error_at refuses others
        return replace(self, inner=self.inner.bind(num_nodes))

    @override
    def config_fields(self) -> list[tuple[str, str]]:
        return [("algorithm", repr(self)), *self.inner.config_fields()]

    @override
    def error_at(self, place: Place) -> str | None:
        own = node_averager.find_ranks_per_node_error(self.ranks_per_node, place.num_ranks)
        if error_text := super().error_at(place) or own:
            return error_text
        if place.schedule and self.ranks_per_node > 1:
            rule = "replicas must average weights or gradients, not both"
            return f"{rule}, got {self!r}: take its inner algorithm, or AllReduce()"
        num_nodes = place.num_ranks // self.ranks_per_node
        rule = f"inner must be for {num_nodes} nodes as its ranks: "
        between = replace(place, num_ranks=num_nodes, size_rule=rule, is_inner=True)
        return self.inner.error_at(between)

    @override
    def start(
        self, module: nn.Module, optimizer: Optimizer, buckets: FlatBuckets, run: Run
    ) -> ModelAverager:
        """Start DistributedDataParallel within the node and the inner algorithm between nodes."""
        if self.ranks_per_node == 1:
            return self.inner.start(module, optimizer, buckets, run)
        shards = node_averager.make_shards(buckets, self.ranks_per_node)
        rule = "ranks_per_node must leave each rank a shard of the parameters"
        got = f"{self.ranks_per_node} for {buckets.num_bytes} bytes"
        require(all(shard.buffers for shard in shards), rule, got)
        rank = run.group_rank
        node = node_averager.node_of(rank, self.ranks_per_node)
        node_run = run.within(node)
        peers = run.within(node_averager.counterparts_of(rank, self.ranks_per_node, run.size))
        inner = self.inner.start(module, optimizer, shards[rank - node[0]], peers)
        within = self.within.start(module, optimizer, buckets, node_run)
        return node_averager.NodeAverager(inner, within, buckets, shards, node_run, run, optimizer)
