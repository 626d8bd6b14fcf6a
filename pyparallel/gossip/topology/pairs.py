"""Matchings: ranks average in pairs, so every push-sum weight stays 1."""

from abc import abstractmethod

import numpy as np
from typing_extensions import override

from ...training.arguments import check_integer
from .base import Topology


class Matching(Topology):
    """A topology whose rounds pair ranks up; partners send each other half of their mass."""

    regular = True

    @abstractmethod
    def partner(self, rank: int, round_index: int) -> int | None:
        """Return the partner of ``rank`` in a round, or None if it has none."""

    @override
    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        partner = self.partner(rank, round_index)
        return () if partner is None else (partner,)

    @override
    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        return self.out_peers(rank, round_index)


class Hypercube(Matching):
    """Round i pairs the ranks that differ in bit i: the exact average after log2(n) rounds.

    The number of ranks must be a power of two.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        if num_ranks & (num_ranks - 1):
            below = 1 << (num_ranks.bit_length() - 1)
            raise ValueError(
                f"num_ranks must be a power of two, got {num_ranks}; the nearest are {below} and "
                f"{2 * below}"
            )
        self.period = max(1, (num_ranks - 1).bit_length())

    @override
    def partner(self, rank: int, round_index: int) -> int | None:
        return rank ^ (1 << round_index % self.period) if self.num_ranks > 1 else None


class BipartiteExponential(Matching):
    """Even ranks pair with odd ones, at offsets +1, -1, +3, -3, +5, -5, +9, -9 and so on in turn.

    The "dynamic bipartite exponential" graph of the code of Assran et al. (ICML 2019), suited to
    AD-PSGD: the active and the passive ranks are the two sides. For an even number of ranks, or 1.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        if num_ranks % 2 and num_ranks > 1:
            raise ValueError(
                f"num_ranks must be even, got {num_ranks}; the nearest are {num_ranks - 1} and "
                f"{num_ranks + 1}"
            )
        distances = [1, *(1 + 2**i for i in range(1, max(1, num_ranks.bit_length())))]
        signed = [sign * distance for distance in distances for sign in (1, -1)]
        self._distances = tuple(dict.fromkeys(distance % num_ranks for distance in signed))
        self.period = len(self._distances)

    @override
    def partner(self, rank: int, round_index: int) -> int | None:
        if self.num_ranks == 1:
            return None
        distance: int = self._distances[round_index % self.period]
        return (rank - distance if rank % 2 else rank + distance) % self.num_ranks


class RandomMatching(Matching):
    """New random pairs every round, the same on all ranks; the topology of NoLoCo.

    With an odd number of ranks, one rank has no partner in each round. The pairs repeat after
    ``period`` rounds; None: eight times the bits of n.
    """

    def __init__(self, num_ranks: int, seed: int = 0, period: int | None = None) -> None:
        super().__init__(num_ranks)
        self.seed = seed
        self.period = 8 * max(1, num_ranks.bit_length()) if period is None else period
        check_integer("period", self.period)
        self._drawn: dict[int, np.ndarray] = {}

    @override
    def partner(self, rank: int, round_index: int) -> int | None:
        index = round_index % self.period
        if index not in self._drawn:
            self._drawn[index] = self._draw(index)
        partner = int(self._drawn[index][rank])
        return None if partner == rank else partner

    def _draw(self, index: int) -> np.ndarray:
        order = np.random.default_rng([self.seed, index]).permutation(self.num_ranks)
        partners = np.arange(self.num_ranks)
        even = self.num_ranks // 2 * 2
        partners[order[:even:2]], partners[order[1:even:2]] = order[1:even:2], order[:even:2]
        return partners

    def __repr__(self) -> str:
        return f"RandomMatching({self.num_ranks}, seed={self.seed}, period={self.period})"
