"""Base classes of topologies: time-varying directed graphs with a column-stochastic mixing matrix.

A topology knows nothing of process groups.
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import product

import numpy as np
from typing_extensions import override

from ...training.arguments import check_integer, check_type
from .edges import Edges

_SHARE_UNIT = 2.0**-40


def round_share(share: float) -> float:
    """Round a share to the nearest multiple of 2**-40.

    Multiples of one power of two add up without rounding: on a regular graph the mass a rank keeps
    (one minus what it sends) and the masses it receives always sum to exactly 1. The error of a
    share, at most 2**-41, is far below float32 resolution.
    """
    return round(share / _SHARE_UNIT) * _SHARE_UNIT


def uniform_share(num_peers: int) -> float:
    """Return the share 1 / (num_peers + 1) that each peer gets and the sender keeps, rounded."""
    return round_share(1 / (num_peers + 1))


@dataclass(frozen=True)
class Neighbors:
    """The out-peers of a rank in a round, the share of its mass each gets, and its in-peers.

    ``in_masses`` are the masses that the in-peers send, if they have the weight 1 on a regular
    topology; else empty. In a *complete* round, which needs three ranks or more, every rank sends
    equal shares to all others.
    """

    out_peers: tuple[int, ...]
    shares: tuple[float, ...]
    in_peers: tuple[int, ...]
    in_masses: tuple[float, ...] = ()
    is_complete: bool = False


class Topology(ABC):
    """A sequence of directed graphs that, after ``preperiod`` rounds, repeats every ``period``.

    A subclass must define ``out_peers``; in-peers, shares and checks are derived from it.
    """

    period: int = 1
    """Number of rounds after which the graphs repeat."""

    preperiod: int = 0
    """Number of rounds before the graphs begin to repeat."""

    regular: bool = False
    """Whether every round keeps every push-sum weight at exactly 1: each rank receives as many
    equal shares as it sends."""

    def __init__(self, num_ranks: int) -> None:
        check_integer("num_ranks", num_ranks)
        self.num_ranks = num_ranks

    @property
    def rounds(self) -> range:
        """The rounds before the graphs repeat and those of one period."""
        return range(self.preperiod + self.period)

    def equivalent_round(self, round_index: int) -> int:
        """Return the first round that has the same graph as ``round_index``, up to repetition."""
        begin = self.preperiod
        return round_index if round_index < begin else begin + (round_index - begin) % self.period

    @abstractmethod
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """Return the ranks that ``rank`` sends to in a round: distinct, and never itself."""

    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """Return the ranks that ``rank`` receives from in a round, ascending."""
        others = range(self.num_ranks)
        return tuple(peer for peer in others if rank in self.out_peers(peer, round_index))

    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        """Return the fraction of its mass that ``rank`` sends to each out-peer; it keeps the rest.

        Shares must be multiples of 2**-40 (see ``round_share``).
        """
        num_peers = len(self.out_peers(rank, round_index))
        return (uniform_share(num_peers),) * num_peers

    def round_edges(self, round_index: int) -> Edges:
        """Return all messages of a round as arrays."""
        found = [
            (rank, peer, share)
            for rank in range(self.num_ranks)
            for peer, share in zip(
                self.out_peers(rank, round_index), self.shares(rank, round_index), strict=True
            )
        ]
        senders, receivers, shares = np.array(found or np.zeros((0, 3))).T
        return Edges.of(senders.astype(int), receivers.astype(int), shares, self.num_ranks)

    def neighbors(self, rank: int, round_index: int) -> Neighbors:
        """Return the out-peers, shares and in-peers of ``rank`` in a round."""
        in_peers = self.in_peers(rank, round_index)
        in_masses: tuple[float, ...] = ()
        if self.regular:
            in_masses = tuple(self._share_of(rank, peer, round_index) for peer in in_peers)
        out_peers, shares = self.out_peers(rank, round_index), self.shares(rank, round_index)
        is_complete = self._is_complete(round_index)
        return Neighbors(out_peers, shares, in_peers, in_masses, is_complete)

    def _is_complete(self, round_index: int) -> bool:
        others = self.num_ranks - 1
        equal = (uniform_share(others),) * others
        ranks = range(self.num_ranks)
        return others > 1 and all(self.shares(rank, round_index) == equal for rank in ranks)

    def _share_of(self, rank: int, sender: int, round_index: int) -> float:
        peers = self.out_peers(sender, round_index)
        return self.shares(sender, round_index)[peers.index(rank)]

    @property
    def degree(self) -> int:
        """Maximum number of messages that a rank sends in a round."""
        places = product(self.rounds, range(self.num_ranks))
        return max(len(self.out_peers(rank, index)) for index, rank in places)

    def mixing_matrix(self, round_index: int) -> np.ndarray:
        """Return the column-stochastic matrix of a round: j gets the share [j, i] of i's mass."""
        matrix = np.zeros((self.num_ranks, self.num_ranks))
        for rank in range(self.num_ranks):
            shares = self.shares(rank, round_index)
            matrix[list(self.out_peers(rank, round_index)), rank] = shares
            matrix[rank, rank] = 1 - sum(shares)
        return matrix

    def fingerprint(self) -> str:
        """Return a digest of out-peers and shares of all rounds: equal for equal graphs."""
        digest = hashlib.sha256()
        if self.preperiod:
            digest.update(repr(self.preperiod).encode())
        for index in self.rounds:
            for rank in range(self.num_ranks):
                sends = (self.out_peers(rank, index), self.shares(rank, index))
                digest.update(repr(sends).encode())
        return digest.hexdigest()[:16]

    def validate(self) -> None:
        """Raise a ValueError unless sends match receives and a period connects all ranks."""
        import networkx as nx

        union = nx.DiGraph()
        union.add_nodes_from(range(self.num_ranks))
        for round_index in self.rounds:
            senders = [set(self.in_peers(rank, round_index)) for rank in range(self.num_ranks)]
            for rank in range(self.num_ranks):
                self._validate_sends(rank, round_index, senders)
                self._validate_receives(rank, round_index)
                if round_index >= self.preperiod:
                    union.add_edges_from((rank, peer) for peer in self.out_peers(rank, round_index))
        if not nx.is_strongly_connected(union):
            raise ValueError(
                f"{self!r} must connect every rank to every other over its period, got "
                f"{nx.number_strongly_connected_components(union)} separate components"
            )

    def validation_error(self, num_ranks: int) -> str | None:
        """Return why a process group of ``num_ranks`` cannot use this topology, or None."""
        if self.num_ranks != num_ranks:
            return f"topology must be for the process group's {num_ranks} ranks, got {self!r}"
        try:
            self.validate()
        except ValueError as error:
            return str(error)
        return None

    def _validate_sends(self, rank: int, round_index: int, senders: list[set[int]]) -> None:
        peers = self.out_peers(rank, round_index)
        location = f"{self!r}, round {round_index}, rank {rank}"
        if len(set(peers)) < len(peers) or not set(peers) <= set(range(self.num_ranks)) - {rank}:
            raise ValueError(f"{location}: out_peers must be distinct other ranks, got {peers}")
        shares = self.shares(rank, round_index)
        if len(shares) != len(peers) or min(shares, default=1) <= 0 or not sum(shares) < 1:
            raise ValueError(
                f"{location}: shares must be positive, one for each of the {len(peers)} peers, and "
                f"sum to less than 1, got {shares}"
            )
        for peer in peers:
            if rank not in senders[peer]:
                raise ValueError(f"{location}: sends to {peer}, which does not receive from it")

    def _validate_receives(self, rank: int, round_index: int) -> None:
        senders = self.in_peers(rank, round_index)
        wrong = [peer for peer in senders if rank not in self.out_peers(peer, round_index)]
        if wrong or len(set(senders)) < len(senders):
            raise ValueError(
                f"{self!r}, round {round_index}, rank {rank}: in_peers must be the ranks that send "
                f"to it, once each, got {senders}"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_ranks})"


def check_topology(topology: object, name: str = "topology") -> None:
    """Raise a TypeError unless an argument is a topology."""
    fix = "FromGraph(graph) takes a networkx graph" if hasattr(topology, "edges") else ""
    check_type(name, topology, Topology, "an object such as topology.Ring(4)", fix)


class OfOthers(Topology):
    """A topology whose rounds are rounds of others."""

    @abstractmethod
    def _locate(self, round_index: int) -> tuple[Topology, int]:
        """Return the topology of a round, and which of its rounds that is."""

    @override
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        topology, index = self._locate(round_index)
        return topology.out_peers(rank, index)

    @override
    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        topology, index = self._locate(round_index)
        return topology.in_peers(rank, index)

    @override
    def shares(self, rank: int, round_index: int) -> tuple[float, ...]:
        topology, index = self._locate(round_index)
        return topology.shares(rank, index)

    @override
    def round_edges(self, round_index: int) -> Edges:
        topology, index = self._locate(round_index)
        return topology.round_edges(index)


class Circulant(Topology):
    """A topology in which every rank sends to the same offsets around a circle; always regular."""

    regular = True

    @abstractmethod
    def offsets(self, round_index: int) -> tuple[int, ...]:
        """Return the distinct offsets of a round, none of them a multiple of ``num_ranks``."""

    @override
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        return tuple((rank + offset) % self.num_ranks for offset in self.offsets(round_index))

    @override
    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        return tuple((rank - offset) % self.num_ranks for offset in self.offsets(round_index))

    @override
    def round_edges(self, round_index: int) -> Edges:
        offsets, n = self.offsets(round_index), self.num_ranks
        shares = np.repeat(self.shares(0, round_index), n)
        senders = np.tile(np.arange(n), len(offsets))
        receivers = (senders + np.repeat(np.array(offsets, dtype=int), n)) % n
        return Edges.of(senders, receivers, shares, n)

    def _distinct(self, offsets: list[int]) -> tuple[int, ...]:
        """Return the offsets modulo the number of ranks, without duplicates and without 0."""
        around = dict.fromkeys(offset % self.num_ranks for offset in offsets)
        return tuple(offset for offset in around if offset != 0)
