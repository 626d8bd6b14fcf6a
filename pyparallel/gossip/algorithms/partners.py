"""Active and passive ranks of each edge in AD-PSGD, and the random choice of neighbors."""

import random
from functools import cached_property

from ..topology import Topology


class Partners:
    """The edges of a symmetric topology, each with an active and a passive rank.

    The edges of all rounds of the topology are used, its shares are not. A graph coloring decides:
    the rank of lower color is active, that of higher color passive. Colors rise along any chain of
    ranks that wait for each other's replies, so there is no deadlock. On a bipartite graph (a ring
    of even length, a hypercube, two ranks) there are two colors: half of the ranks are active and
    the other half passive, as in AD-PSGD. ``seed`` is that of the random choices.
    """

    def __init__(self, topology: Topology, seed: int = 0) -> None:
        self._topology = topology
        self._seed = seed

    def find_asymmetry(self) -> str | None:
        """Return where the topology is not symmetric, or None."""
        for rank, peers in enumerate(self._out_peers):
            for peer in peers:
                if rank not in self._out_peers[peer]:
                    return (
                        "topology must be symmetric for ADPSGD (SGP takes any), got "
                        f"{self._topology!r}, where {rank} sends to {peer} and {peer} never sends "
                        f"to {rank}"
                    )
        return None

    def passive_neighbors(self, rank: int) -> tuple[int, ...]:
        """Return the neighbors that ``rank`` may send requests to, ascending."""
        peers, colors = self._out_peers[rank], self._colors
        return tuple(peer for peer in peers if colors[peer] > colors[rank])

    def active_neighbors(self, rank: int) -> tuple[int, ...]:
        """Return the neighbors that may send requests to ``rank``, ascending."""
        peers, colors = self._out_peers[rank], self._colors
        return tuple(peer for peer in peers if colors[peer] < colors[rank])

    def choose(self, rank: int, index: int) -> int:
        """Return the receiver of request number ``index`` of ``rank``, drawn uniformly."""
        return random.Random(f"{self._seed}/{rank}/{index}").choice(self.passive_neighbors(rank))

    @cached_property
    def _out_peers(self) -> list[dict[int, None]]:
        topology = self._topology
        return [
            dict.fromkeys(sorted(p for k in topology.rounds for p in topology.out_peers(rank, k)))
            for rank in range(topology.num_ranks)
        ]

    @cached_property
    def _colors(self) -> dict[int, int]:
        import networkx as nx

        graph = nx.Graph()
        graph.add_nodes_from(range(self._topology.num_ranks))
        graph.add_edges_from((i, j) for i, peers in enumerate(self._out_peers) for j in peers)
        # In breadth-first order greedy coloring needs only two colors on bipartite graphs. The
        # first rank has the lowest degree: the hub of a star is passive, which takes fewer steps.
        first = min(graph, key=graph.degree)
        order = [first, *(child for _, child in nx.bfs_edges(graph, first))]
        colors: dict[int, int] = nx.greedy_color(graph, strategy=lambda *_: order)
        return colors
