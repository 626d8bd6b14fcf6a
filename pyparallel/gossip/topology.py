"""Who sends to whom at which round, and which share: policy that knows no process group.

Every topology takes the number of ranks first and serves any number of them, one included.
"""

import hashlib
from abc import ABC, abstractmethod

import networkx as nx
import numpy as np

_SHARE_UNIT = 2.0**-40


def uniform_share(num_peers: int) -> float:
    """The share 1 / (num_peers + 1) each peer gets, rounded to a multiple of 2**-40.

    Multiples of one power of two add up without rounding: the mass a rank keeps (one minus what
    it sent) and the masses it receives sum to exactly 1 on a regular graph, for ever. The error
    of a share, at most 2**-41, is far below what fp32 parameters can show.
    """
    return round(1 / (num_peers + 1) / _SHARE_UNIT) * _SHARE_UNIT


class Topology(ABC):
    """A sequence of directed graphs that repeats with ``period``.

    A subclass says who receives from a rank; receivers, shares and checks follow from that.
    """

    def __init__(self, num_ranks: int) -> None:
        if not isinstance(num_ranks, int) or num_ranks < 1:
            raise ValueError(f"num_ranks must be a positive integer, got {num_ranks!r}")
        self.num_ranks = num_ranks

    @property
    def period(self) -> int:
        """After how many rounds the graphs repeat."""
        return 1

    @property
    def regular(self) -> bool:
        """Whether every round leaves every weight at exactly 1, so that plain averaging is right.

        True where each rank receives as many equal shares as it sends.
        """
        return False

    @abstractmethod
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """The ranks that ``rank`` sends to in a round: distinct, and never itself."""

    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """The ranks that ``rank`` receives from in a round, ascending."""
        others = range(self.num_ranks)
        return tuple(peer for peer in others if rank in self.out_peers(peer, round_index))

    def share(self, rank: int, round_index: int) -> float:
        """The fraction of its mass that ``rank`` sends to each peer; it keeps the rest."""
        return uniform_share(len(self.out_peers(rank, round_index)))

    def mixing_matrix(self, round_index: int) -> np.ndarray:
        """The column-stochastic matrix of a round: entry [j, i] is what j gets of i's mass."""
        matrix = np.zeros((self.num_ranks, self.num_ranks))
        for rank in range(self.num_ranks):
            peers = self.out_peers(rank, round_index)
            share = self.share(rank, round_index)
            matrix[list(peers), rank] = share
            matrix[rank, rank] = 1 - len(peers) * share
        return matrix

    def fingerprint(self) -> str:
        """A digest of who sends which share to whom over one period: equal for equal graphs."""
        digest = hashlib.sha256()
        for index in range(self.period):
            for rank in range(self.num_ranks):
                sends = (self.out_peers(rank, index), self.share(rank, index))
                digest.update(repr(sends).encode())
        return digest.hexdigest()[:16]

    def validate(self) -> None:
        """Prove over one period that sends match receives and that news reaches everyone.

        Raises:
            ValueError: the first violation found, with its round and rank.
        """
        union = nx.DiGraph()
        union.add_nodes_from(range(self.num_ranks))
        for round_index in range(self.period):
            senders = [set(self.in_peers(rank, round_index)) for rank in range(self.num_ranks)]
            for rank in range(self.num_ranks):
                self._validate_sends(rank, round_index, senders)
                union.add_edges_from((rank, peer) for peer in self.out_peers(rank, round_index))
        if not nx.is_strongly_connected(union):
            raise ValueError(
                f"{self!r} must connect every rank to every other over its period, got "
                f"{nx.number_strongly_connected_components(union)} separate parts"
            )

    def _validate_sends(self, rank: int, round_index: int, senders: list[set[int]]) -> None:
        peers = self.out_peers(rank, round_index)
        place = f"{self!r}, round {round_index}, rank {rank}"
        if len(set(peers)) < len(peers) or not set(peers) <= set(range(self.num_ranks)) - {rank}:
            raise ValueError(f"{place}: out_peers must be distinct other ranks, got {peers}")
        if not 0 <= len(peers) * self.share(rank, round_index) < 1:
            raise ValueError(
                f"{place}: shares must be positive and leave the sender a part, got "
                f"{self.share(rank, round_index)} for each of {len(peers)} peers"
            )
        for peer in peers:
            if rank not in senders[peer]:
                raise ValueError(f"{place}: sends to {peer}, which does not receive from it")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_ranks})"


class Circulant(Topology):
    """Every rank sends to the same offsets around a circle: regular, whatever the offsets."""

    @abstractmethod
    def offsets(self, round_index: int) -> tuple[int, ...]:
        """Distinct steps around the circle, none of them a multiple of ``num_ranks``."""

    @property
    def regular(self) -> bool:
        """True: each rank receives exactly as many equal shares as it sends."""
        return True

    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """The ranks at the offsets of this round."""
        return tuple((rank + offset) % self.num_ranks for offset in self.offsets(round_index))

    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """The ranks that have this one at their offsets."""
        return tuple((rank - offset) % self.num_ranks for offset in self.offsets(round_index))

    def _distinct(self, offsets: list[int]) -> tuple[int, ...]:
        """Offsets modulo the number of ranks, without repetition and without oneself."""
        around = dict.fromkeys(offset % self.num_ranks for offset in offsets)
        return tuple(offset for offset in around if offset != 0)


class Ring(Circulant):
    """Both neighbors on a ring, every round. Mixing slows down with the square of the ranks."""

    def offsets(self, round_index: int) -> tuple[int, ...]:
        """One step either way."""
        return self._distinct([1, -1])


class OnePeerExponential(Circulant):
    """``peers`` messages a round, at distances that grow by powers of ``peers + 1``.

    Round i reaches ``j * (peers + 1) ** i`` for j = 1 .. peers. With ``(peers + 1) ** m`` ranks the
    average is exact after m rounds (Assran et al., ICML 2019; Ying et al., NeurIPS 2021); with
    other numbers of ranks it is approached geometrically.
    """

    def __init__(self, num_ranks: int, peers: int = 1) -> None:
        super().__init__(num_ranks)
        most = max(1, num_ranks - 1)
        if not isinstance(peers, int) or not 1 <= peers <= most:
            raise ValueError(
                f"peers must be between 1 and {most} for {num_ranks} ranks, got {peers!r}"
            )
        self.peers = peers
        # Integer powers: a floating-point logarithm misses hops (for example log(243, 3) < 5).
        self._distances = [1]
        while self._distances[-1] * (peers + 1) < num_ranks:
            self._distances.append(self._distances[-1] * (peers + 1))

    @property
    def period(self) -> int:
        """One round per distance."""
        return len(self._distances)

    def offsets(self, round_index: int) -> tuple[int, ...]:
        """The multiples of this round's distance."""
        distance = self._distances[round_index % self.period]
        return self._distinct([j * distance for j in range(1, self.peers + 1)])

    def __repr__(self) -> str:
        return f"OnePeerExponential({self.num_ranks}, peers={self.peers})"


class DirectedExponential(Circulant):
    """One message a round, at distances +1, -1, +2, -2, +4, -4 and so on, in turn.

    The graph of the experiments in Assran et al. (ICML 2019). Exact after 2 log2(n) - 1 rounds
    where the number of ranks n is a power of two.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        powers = [2**i for i in range((num_ranks - 1).bit_length())]
        self._offsets = self._distinct([sign * power for power in powers for sign in (1, -1)])

    @property
    def period(self) -> int:
        """One round per distinct offset."""
        return max(1, len(self._offsets))

    def offsets(self, round_index: int) -> tuple[int, ...]:
        """The one offset whose turn it is."""
        return self._offsets[round_index % self.period :][:1]


class Complete(Circulant):
    """Everyone to everyone, every round: the exact average at the price of n - 1 messages."""

    def offsets(self, round_index: int) -> tuple[int, ...]:
        """All other ranks."""
        return tuple(range(1, self.num_ranks))
