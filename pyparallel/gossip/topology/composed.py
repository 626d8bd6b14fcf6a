"""Topologies made of topologies."""

import math
from collections.abc import Callable, Sequence

from .base import Topology, round_share
from .circulant import Complete, OnePeerExponential


class TimeVarying(Topology):
    """Several topologies in turn, one round of each.

    Args:
        topologies: for the same number of ranks.
    """

    def __init__(self, topologies: Sequence[Topology]) -> None:
        self.topologies = tuple(topologies)
        sizes = sorted({topology.num_ranks for topology in self.topologies})
        if len(sizes) != 1:
            raise ValueError(f"topologies must be for one number of ranks, got {sizes}")
        super().__init__(sizes[0])

    @property
    def period(self) -> int:
        """Until all of them have come round together."""
        return len(self.topologies) * math.lcm(*(each.period for each in self.topologies))

    @property
    def regular(self) -> bool:
        """Whether each of them is."""
        return all(topology.regular for topology in self.topologies)

    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """As the one says whose turn it is."""
        return self._turn(round_index).out_peers(rank, round_index // len(self.topologies))

    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """Likewise."""
        return self._turn(round_index).in_peers(rank, round_index // len(self.topologies))

    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        """Likewise."""
        return self._turn(round_index).shares(rank, round_index // len(self.topologies))

    def _turn(self, round_index: int) -> Topology:
        return self.topologies[round_index % len(self.topologies)]

    def __repr__(self) -> str:
        return f"TimeVarying({list(self.topologies)!r})"


class Lazy(Topology):
    """A topology in which only a part of the mass that would move does, and the rest stays.

    For gossip with aggressive compressors, which diverges where ranks move by more than messages
    can say: ``gamma`` is the consensus step size of CHOCO-SGD (Koloskova et al., ICML 2019, arXiv
    1902.00340). The smaller, the slower ranks meet. What was enough for ranks that average normally
    distributed numbers, on ``Ring(4)``, ``OnePeerExponential(8)`` and ``Complete(8)``:

    - 1: ``Cast``, ``Int8``, ``Int4``, ``QSGD``, ``Natural``, ``TopK(0.5)``
    - 0.2: ``TopK(0.1)``, ``PowerSGD`` with two fifths of a matrix's bytes,
      ``Ternary(block_size=32)``
    - 0.05: ``TopK(0.01)``, ``PowerSGD`` with a tenth, ``RandomK(0.1)``, ``Sign(block_size=32)``;
      with larger blocks it brings ranks to some hundredths of where they began, and then hardly
      nearer
    - 0.01: ``Ternary()``

    Args:
        topology: who sends to whom, and of which share a part is sent.
        gamma: that part, in (0, 1].
    """

    def __init__(self, topology: Topology, gamma: float) -> None:
        super().__init__(topology.num_ranks)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma must be a part of the mass, in (0, 1], got {gamma!r}")
        self.topology = topology
        self.gamma = gamma

    @property
    def period(self) -> int:
        """As of the topology."""
        return self.topology.period

    @property
    def regular(self) -> bool:
        """As the topology is."""
        return self.topology.regular

    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """As the topology says."""
        return self.topology.out_peers(rank, round_index)

    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """Likewise."""
        return self.topology.in_peers(rank, round_index)

    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        """Of each share the part."""
        shares = self.topology.shares(rank, round_index)
        return tuple(round_share(self.gamma * share) for share in shares)

    def __repr__(self) -> str:
        return f"Lazy({self.topology!r}, gamma={self.gamma})"


class Blocks(Topology):
    """Consecutive ranks form nodes of equal size; inside each, the same topology."""

    def __init__(self, num_ranks: int, inside: Topology) -> None:
        super().__init__(num_ranks)
        self._inside = inside

    @property
    def period(self) -> int:
        """That of the topology inside."""
        return self._inside.period

    @property
    def regular(self) -> bool:
        """As the topology inside is."""
        return self._inside.regular

    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """The peers within the node."""
        node, place = divmod(rank, self._inside.num_ranks)
        first = node * self._inside.num_ranks
        return tuple(first + peer for peer in self._inside.out_peers(place, round_index))

    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """Likewise."""
        node, place = divmod(rank, self._inside.num_ranks)
        first = node * self._inside.num_ranks
        return tuple(first + peer for peer in self._inside.in_peers(place, round_index))

    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        """Likewise."""
        return self._inside.shares(rank % self._inside.num_ranks, round_index)


class Planes(Topology):
    """The ranks of the same place in their nodes talk to each other, by a topology of nodes."""

    def __init__(self, num_ranks: int, between: Topology) -> None:
        super().__init__(num_ranks)
        self._between = between
        self._local = num_ranks // between.num_ranks

    @property
    def period(self) -> int:
        """That of the topology of nodes."""
        return self._between.period

    @property
    def regular(self) -> bool:
        """As the topology of nodes is."""
        return self._between.regular

    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """The same place in the peers of one's node."""
        node, place = divmod(rank, self._local)
        peers = self._between.out_peers(node, round_index)
        return tuple(peer * self._local + place for peer in peers)

    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """Likewise."""
        node, place = divmod(rank, self._local)
        peers = self._between.in_peers(node, round_index)
        return tuple(peer * self._local + place for peer in peers)

    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        """Likewise."""
        return self._between.shares(rank // self._local, round_index)


class Hierarchical(TimeVarying):
    """Everyone within the node, then one's own place in another node, in turn.

    For nodes with a fast network inside and a slow one between them: every other round stays in
    the node.

    Args:
        num_ranks: a multiple of ``ranks_per_node``; consecutive ranks form a node.
        ranks_per_node: how many.
        between: makes the topology of nodes from their number.
    """

    def __init__(
        self,
        num_ranks: int,
        ranks_per_node: int = 1,
        between: Callable[[int], Topology] = OnePeerExponential,
    ) -> None:
        if ranks_per_node < 1 or num_ranks % ranks_per_node:
            raise ValueError(
                f"ranks_per_node must divide the {num_ranks} ranks, got {ranks_per_node}"
            )
        self.ranks_per_node = ranks_per_node
        self.between = between(num_ranks // ranks_per_node)
        inside = Blocks(num_ranks, Complete(ranks_per_node))
        super().__init__([inside, Planes(num_ranks, self.between)])

    def __repr__(self) -> str:
        return f"Hierarchical({self.num_ranks}, {self.ranks_per_node}, between={self.between!r})"
