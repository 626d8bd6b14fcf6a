"""Topologies composed of other topologies."""

import math
from collections.abc import Callable, Sequence

from typing_extensions import override

from ...training.arguments import check_callable, check_in, require
from .base import OfOthers, Topology, check_topology, round_share
from .circulant import Complete, OnePeerExponential
from .edges import Edges


class TimeVarying(OfOthers):
    """Several topologies in turn, one round of each, all for the same number of ranks."""

    def __init__(self, topologies: Sequence[Topology]) -> None:
        self.topologies = tuple(topologies)
        for each in self.topologies:
            check_topology(each, "each of topologies")
        sizes = sorted({topology.num_ranks for topology in self.topologies})
        require(len(sizes) == 1, "topologies must be for one number of ranks", str(sizes))
        super().__init__(sizes[0])
        self.preperiod = len(topologies) * max(each.preperiod for each in self.topologies)
        self.period = len(topologies) * math.lcm(*(each.period for each in self.topologies))
        self.regular = all(topology.regular for topology in self.topologies)

    @override
    def _locate(self, round_index: int) -> tuple[Topology, int]:
        index, place = divmod(round_index, len(self.topologies))
        return self.topologies[place], index

    def __repr__(self) -> str:
        return f"TimeVarying({list(self.topologies)!r})"


class _LikeAnother(OfOthers):
    """A topology with the rounds of another one."""

    def __init__(self, num_ranks: int, topology: Topology) -> None:
        super().__init__(num_ranks)
        self.topology = topology
        self.preperiod, self.period = topology.preperiod, topology.period
        self.regular = topology.regular

    @override
    def _locate(self, round_index: int) -> tuple[Topology, int]:
        return self.topology, round_index

    @override
    def round_edges(self, round_index: int) -> Edges:
        return Topology.round_edges(self, round_index)  # those of the other differ


class Lazy(_LikeAnother):
    """A lazy version of a topology: shares are multiplied by ``gamma``; the sender keeps the rest.

    For gossip with aggressive compressors, which diverges if ranks mix faster than messages can
    convey: ``gamma``, in (0, 1], is the consensus step size of CHOCO-SGD (Koloskova et al., ICML
    2019, arXiv 1902.00340). A smaller one slows down consensus. Values that converged when
    averaging normally distributed numbers on ``Ring(4)``, ``OnePeerExponential(8)`` and
    ``Complete(8)``:

    - 1: ``Cast``, ``Int8``, ``Int4``, ``QSGD``, ``Natural``, ``TopK(0.5)``
    - 0.2: ``TopK(0.1)``, ``PowerSGD`` with two fifths of a matrix's bytes,
      ``Ternary(block_size=32)``
    - 0.05: ``TopK(0.01)``, ``PowerSGD`` with a tenth, ``RandomK(0.1)``, ``Sign(block_size=32)``;
      with larger blocks the consensus distance stalls at some hundredths of its initial value
    - 0.01: ``Ternary()``
    """

    def __init__(self, topology: Topology, gamma: float) -> None:
        check_topology(topology)
        super().__init__(topology.num_ranks, topology)
        check_in("gamma", gamma, "(0, 1]")
        self.gamma = gamma

    @override
    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        return tuple(round_share(self.gamma * share) for share in super().shares(rank, round_index))

    def __repr__(self) -> str:
        return f"Lazy({self.topology!r}, gamma={self.gamma})"


class IntraNode(_LikeAnother):
    """One topology inside every node; consecutive ranks form nodes of equal size."""

    def __init__(self, num_ranks: int, within: Topology) -> None:
        super().__init__(num_ranks, within)

    @override
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        node, local_rank = divmod(rank, self.topology.num_ranks)
        first = node * self.topology.num_ranks
        return tuple(first + peer for peer in self.topology.out_peers(local_rank, round_index))

    @override
    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        node, local_rank = divmod(rank, self.topology.num_ranks)
        first = node * self.topology.num_ranks
        return tuple(first + peer for peer in self.topology.in_peers(local_rank, round_index))

    @override
    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        return self.topology.shares(rank % self.topology.num_ranks, round_index)


class InterNode(_LikeAnother):
    """One topology between nodes, along which ranks of equal local rank communicate."""

    def __init__(self, num_ranks: int, between: Topology) -> None:
        super().__init__(num_ranks, between)
        self._ranks_per_node = num_ranks // between.num_ranks

    @override
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        node, local_rank = divmod(rank, self._ranks_per_node)
        peers = self.topology.out_peers(node, round_index)
        return tuple(peer * self._ranks_per_node + local_rank for peer in peers)

    @override
    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        node, local_rank = divmod(rank, self._ranks_per_node)
        peers = self.topology.in_peers(node, round_index)
        return tuple(peer * self._ranks_per_node + local_rank for peer in peers)

    @override
    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        return self.topology.shares(rank // self._ranks_per_node, round_index)


class HierarchicalTopology(TimeVarying):
    """A complete graph within each node and a topology between nodes, in turn.

    For nodes with a fast network inside and a slow one between them: every other round stays
    within the node; in the others, ranks of equal local rank communicate between nodes.

    Args:
        num_ranks: a multiple of ``ranks_per_node``; consecutive ranks form a node.
        between: creates the topology between nodes from the number of nodes.
    """

    def __init__(
        self,
        num_ranks: int,
        ranks_per_node: int = 1,
        between: Callable[[int], Topology] = OnePeerExponential,
    ) -> None:
        fits = ranks_per_node >= 1 and num_ranks % ranks_per_node == 0
        require(fits, f"ranks_per_node must divide the {num_ranks} ranks", ranks_per_node)
        fix = f"pass the class {type(between).__name__}"
        check_callable("between", between, "a function of the number of nodes such as Ring", fix)
        self.ranks_per_node = ranks_per_node
        self.between = between(num_ranks // ranks_per_node)
        within = IntraNode(num_ranks, Complete(ranks_per_node))
        super().__init__([within, InterNode(num_ranks, self.between)])

    def __repr__(self) -> str:
        return (
            f"HierarchicalTopology({self.num_ranks}, {self.ranks_per_node}, "
            f"between={self.between!r})"
        )
