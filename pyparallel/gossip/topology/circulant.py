"""Circulant topologies: every rank sends to the same offsets around a circle."""

from typing_extensions import override

from ...training.arguments import check_integer, is_integer, require
from .base import Circulant


class Ring(Circulant):
    """Both neighbors on a ring, every round; the mixing time grows with the square of the ranks."""

    @override
    def offsets(self, round_index: int) -> tuple[int, ...]:
        return self._distinct([1, -1])


class OnePeerExponential(Circulant):
    """One-peer exponential graph: ``peers`` messages a round, at offsets that grow exponentially.

    Round i sends to offsets ``j * (peers + 1) ** i`` for j = 1 .. peers. With ``(peers + 1) ** m``
    ranks the average is exact after m rounds (Assran et al., ICML 2019; Ying et al., NeurIPS 2021);
    with other numbers of ranks it converges geometrically.
    """

    def __init__(self, num_ranks: int, peers: int = 1) -> None:
        super().__init__(num_ranks)
        most = max(1, num_ranks - 1)
        rule = f"between 1 and {most} for {num_ranks} ranks"
        require(is_integer(peers) and peers <= most, f"peers must be {rule}", repr(peers))
        self.peers = peers
        # Integer powers: a floating-point logarithm misses hops (for example log(243, 3) < 5).
        self._distances = [1]
        while self._distances[-1] * (peers + 1) < num_ranks:
            self._distances.append(self._distances[-1] * (peers + 1))
        self.period = len(self._distances)

    @override
    def offsets(self, round_index: int) -> tuple[int, ...]:
        distance = self._distances[round_index % self.period]
        return self._distinct([j * distance for j in range(1, self.peers + 1)])

    def __repr__(self) -> str:
        return f"OnePeerExponential({self.num_ranks}, peers={self.peers})"


class _InTurn(Circulant):
    """One message a round, at each of some offsets in turn."""

    def __init__(self, num_ranks: int, offsets: list[int]) -> None:
        super().__init__(num_ranks)
        self._offsets = self._distinct(offsets)
        self.period = max(1, len(self._offsets))

    @override
    def offsets(self, round_index: int) -> tuple[int, ...]:
        return self._offsets[round_index % self.period :][:1]


class DirectedExponential(_InTurn):
    """One message a round, at offsets +1, -1, +2, -2, +4, -4 and so on, in turn.

    The graph of the experiments in Assran et al. (ICML 2019). Exact after 2 log2(n) - 1 rounds
    if the number of ranks n is a power of two.
    """

    def __init__(self, num_ranks: int) -> None:
        check_integer("num_ranks", num_ranks)
        powers = [2**i for i in range((num_ranks - 1).bit_length())]
        super().__init__(num_ranks, [sign * power for power in powers for sign in (1, -1)])


class DirectedLinear(_InTurn):
    """One message a round, at offsets +1, -1, +3, -3 and so on through all odd offsets, in turn.

    The "dynamic directed linear" graph of the code of Assran et al. (ICML 2019).
    """

    def __init__(self, num_ranks: int) -> None:
        check_integer("num_ranks", num_ranks)
        odd = range(1, num_ranks, 2)
        super().__init__(num_ranks, [sign * offset for offset in odd for sign in (1, -1)])


class Complete(Circulant):
    """Complete graph: the exact average every round, with n - 1 messages per rank."""

    @override
    def offsets(self, round_index: int) -> tuple[int, ...]:
        return tuple(range(1, self.num_ranks))
