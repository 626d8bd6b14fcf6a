"""Who may ask whom for an average, and whom a rank asks next: policy, equal on all ranks."""

import random
from functools import cached_property

import networkx as nx

from ..topology import Topology


class Partners:
    """Neighbors of a symmetric topology, of whom one asks and the other answers on each edge.

    The edges of all rounds of the topology count, its shares do not. Who asks is decided by a
    coloring in which neighbors never have the same color: the lower color asks the higher. So
    a chain of ranks that wait for each other's answers always climbs, and ends. Where the graph is
    bipartite (a ring of even length, a hypercube, two ranks), there are two colors, and half of the
    ranks ask while the other half answers, as in AD-PSGD.

    Args:
        topology: symmetric (see ``problem``).
        seed: of the choices.
    """

    def __init__(self, topology: Topology, seed: int = 0) -> None:
        self._topology = topology
        self._seed = seed

    def validation_error(self) -> str | None:
        """Where the topology is not symmetric, as a sentence, or None."""
        for rank, peers in enumerate(self._out_peers):
            for peer in peers:
                if rank not in self._out_peers[peer]:
                    return (
                        "topology must be symmetric for ADPSGD (SGP takes any), got "
                        f"{self._topology!r}, where {rank} sends to {peer} and {peer} never sends "
                        f"to {rank}"
                    )
        return None

    def asked_by(self, rank: int) -> tuple[int, ...]:
        """The neighbors that ``rank`` may ask, ascending."""
        peers, colors = self._out_peers[rank], self._colors
        return tuple(peer for peer in peers if colors[peer] > colors[rank])

    def askers_of(self, rank: int) -> tuple[int, ...]:
        """The neighbors that may ask ``rank``, ascending."""
        peers, colors = self._out_peers[rank], self._colors
        return tuple(peer for peer in peers if colors[peer] < colors[rank])

    def choose(self, rank: int, index: int) -> int:
        """Whom ``rank`` asks with its request number ``index``: each neighbor it may, as likely."""
        return random.Random(f"{self._seed}/{rank}/{index}").choice(self.asked_by(rank))

    @cached_property
    def _out_peers(self) -> list[list[int]]:
        topology = self._topology
        return [
            sorted({p for index in range(topology.period) for p in topology.out_peers(rank, index)})
            for rank in range(topology.num_ranks)
        ]

    @cached_property
    def _colors(self) -> dict[int, int]:
        graph = nx.Graph()
        graph.add_nodes_from(range(self._topology.num_ranks))
        graph.add_edges_from((i, j) for i, peers in enumerate(self._out_peers) for j in peers)
        # Breadth first, greed needs two colors wherever two are enough. It begins at a rank with
        # few neighbors, so that the hub of a star answers, which takes fewer steps than asking.
        first = min(graph, key=graph.degree)
        order = [first, *(child for _, child in nx.bfs_edges(graph, first))]
        colors: dict[int, int] = nx.greedy_color(graph, strategy=lambda *_: order)
        return colors
