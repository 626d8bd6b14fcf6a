"""Topologies given edge by edge: from a networkx graph or a mixing matrix."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from ...training.arguments import require
from .base import Topology, round_share, uniform_share

if TYPE_CHECKING:
    import networkx as nx

RoundShares = Mapping[int, Mapping[int, float]]
"""Maps sender to receiver to share; a sender that is missing keeps all of its mass."""


class Explicit(Topology):
    """A topology with explicit shares for each round, by sender and receiver; the rounds repeat."""

    def __init__(self, num_ranks: int, rounds: Sequence[RoundShares]) -> None:
        super().__init__(num_ranks)
        require(rounds, "rounds must hold at least one round", "none")
        self._out = [
            {rank: dict(sorted(edges.items())) for rank, edges in one.items()} for one in rounds
        ]
        self._in = [_in_peers_of_all(one, num_ranks) for one in self._out]
        self.period = len(rounds)
        self.regular = all(self._keeps_weights(index) for index in range(len(rounds)))

    @override
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        return tuple(self._out[round_index % self.period].get(rank, ()))

    @override
    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        return tuple(self._in[round_index % self.period][rank])

    @override
    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        return tuple(self._out[round_index % self.period].get(rank, {}).values())

    def _keeps_weights(self, index: int) -> bool:
        received = [0.0] * self.num_ranks
        for edges in self._out[index].values():
            for receiver, share in edges.items():
                received[receiver] += share
        return all(sum(self.shares(r, index)) == received[r] for r in range(self.num_ranks))


class FromGraph(Explicit):
    """A custom graph, the same in every round; ``TimeVarying`` alternates between several.

    Args:
        graph: its nodes must be the ranks 0 to n - 1. Edges of an undirected graph go both ways.
            If every edge has a ``weight``, it is the share of the sender's mass that is sent along
            it; if none has one, a rank keeps as much as each of its peers gets.
    """

    def __init__(self, graph: "nx.DiGraph") -> None:
        import networkx as nx

        directed = nx.DiGraph(graph)
        directed.remove_edges_from(list(nx.selfloop_edges(directed)))
        num_ranks = directed.number_of_nodes()
        rule = f"graph must have the ranks 0 to {num_ranks - 1} as its nodes"
        require(set(directed) == set(range(num_ranks)), rule, str(sorted(map(str, directed))[:8]))
        weights = nx.get_edge_attributes(directed, "weight")
        if weights and len(weights) < directed.number_of_edges():
            raise ValueError(
                "graph must have a weight on every edge or on none, got "
                f"{len(weights)} on {directed.number_of_edges()} edges"
            )
        edges = {
            rank: {
                peer: round_share(weights[rank, peer]) if weights else uniform_share(len(peers))
                for peer in peers
            }
            for rank, peers in directed.adjacency()
        }
        super().__init__(num_ranks, [edges])

    def __repr__(self) -> str:
        num_edges = sum(len(self.out_peers(rank, 0)) for rank in range(self.num_ranks))
        return f"FromGraph({self.num_ranks} ranks, {num_edges} edges)"


class FromMatrix(Explicit):
    """A custom mixing matrix: entry [j, i] is the share of rank i's mass that rank j gets.

    It is (n, n) and nonnegative, with column sums 1 (to 1e-9) and a positive diagonal.
    """

    def __init__(self, matrix: np.ndarray) -> None:
        matrix = np.asarray(matrix, dtype=float)
        is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
        require(is_square, "matrix must be square", f"shape {matrix.shape}")
        require((matrix >= 0).all(), "matrix must be nonnegative", str(matrix.min()))
        sums = matrix.sum(axis=0)
        worst = int(np.abs(sums - 1).argmax())
        found = f"{sums[worst]} in column {worst}"
        require(abs(sums[worst] - 1) <= 1e-9, "matrix must have column sums 1", found)
        edges = {
            i: {int(j): round_share(matrix[j, i]) for j in np.nonzero(matrix[:, i])[0] if j != i}
            for i in range(len(matrix))
        }
        super().__init__(len(matrix), [edges])

    def __repr__(self) -> str:
        return f"FromMatrix({self.num_ranks} ranks)"


def _in_peers_of_all(one_round: RoundShares, num_ranks: int) -> list[list[int]]:
    senders: list[list[int]] = [[] for _ in range(num_ranks)]
    for sender in sorted(one_round):
        for receiver in one_round[sender]:
            senders[receiver].append(sender)
    return senders
