"""Graphs in which ranks average two by two: symmetric, so every weight stays 1."""

from abc import abstractmethod

import numpy as np

from .base import Topology


class Matching(Topology):
    """Every round pairs ranks off; partners send each other half of their mass."""

    @abstractmethod
    def partner(self, rank: int, round_index: int) -> int | None:
        """Who averages with ``rank`` in a round, if anyone."""

    @property
    def regular(self) -> bool:
        """True: what a rank sends it also receives."""
        return True

    def out_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """The partner."""
        partner = self.partner(rank, round_index)
        return () if partner is None else (partner,)

    def in_peers(self, rank: int, round_index: int) -> tuple[int, ...]:
        """The partner."""
        return self.out_peers(rank, round_index)


class Hypercube(Matching):
    """Round i pairs the ranks that differ in bit i: the exact average after log2(n) rounds.

    Args:
        num_ranks: a power of two.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        if num_ranks & (num_ranks - 1):
            below = 1 << (num_ranks.bit_length() - 1)
            raise ValueError(
                f"num_ranks must be a power of two, got {num_ranks}; the nearest are {below} and "
                f"{2 * below}"
            )

    @property
    def period(self) -> int:
        """One round per bit."""
        return max(1, (self.num_ranks - 1).bit_length())

    def partner(self, rank: int, round_index: int) -> int | None:
        """The rank across this round's dimension."""
        return rank ^ (1 << round_index % self.period) if self.num_ranks > 1 else None


class BipartiteExponential(Matching):
    """Even ranks pair with odd ones, at distances +1, -1, +3, -3, +5, -5, +9, -9 and so on in turn.

    The "dynamic bipartite exponential" graph of the code of Assran et al. (ICML 2019): one side may
    wait while the other one talks, as AD-PSGD needs.

    Args:
        num_ranks: an even number, or 1.
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

    @property
    def period(self) -> int:
        """One round per distinct distance."""
        return len(self._distances)

    def partner(self, rank: int, round_index: int) -> int | None:
        """An even rank looks ahead by the distance, an odd one back."""
        if self.num_ranks == 1:
            return None
        distance: int = self._distances[round_index % self.period]
        return (rank - distance if rank % 2 else rank + distance) % self.num_ranks


class RandomMatching(Matching):
    """Random pairs, drawn anew every round, the same on all ranks; NoLoCo's choice of peers.

    With an odd number of ranks one of them rests in each round.

    Args:
        num_ranks: any number.
        seed: of the draws.
        period: after how many rounds they repeat; None: eight times the number of bits of n.
    """

    def __init__(self, num_ranks: int, seed: int = 0, period: int | None = None) -> None:
        super().__init__(num_ranks)
        self.seed = seed
        self._period = 8 * max(1, num_ranks.bit_length()) if period is None else period
        if self._period < 1:
            raise ValueError(f"period must be positive, got {period}")
        self._drawn: dict[int, np.ndarray] = {}

    @property
    def period(self) -> int:
        """As it was chosen."""
        return self._period

    def partner(self, rank: int, round_index: int) -> int | None:
        """Whoever was drawn beside this rank."""
        index = round_index % self._period
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
        return f"RandomMatching({self.num_ranks}, seed={self.seed}, period={self._period})"
