"""Finite-time graphs: exact consensus after a few rounds, for any number of ranks."""

import functools
from collections.abc import Sequence

from ...training.arguments import check_integer
from .base import round_share
from .explicit import Explicit

Edges = dict[tuple[int, int], float]
"""Undirected edges with the share that is sent along them in both directions."""


class BaseGraph(Explicit):
    """The Base-(k+1) graph: exact for *any* number of ranks, ``peers`` or k messages a round.

    Takes at most 2 log_{k+1}(n) + 2 rounds, while one-peer exponential graphs are exact only for
    powers of k + 1 (Takezawa et al., NeurIPS 2023, arXiv 2305.11420). Symmetric, so every push-sum
    weight stays 1.
    """

    def __init__(self, num_ranks: int, peers: int = 1) -> None:
        check_integer("num_ranks", num_ranks)
        check_integer("peers", peers)
        self.peers = peers
        rounds = _base_rounds(range(num_ranks), peers + 1)
        super().__init__(num_ranks, [_both_ways(edges) for edges in rounds] or [{}])

    def __repr__(self) -> str:
        return f"BaseGraph({self.num_ranks}, peers={self.peers})"


def _both_ways(edges: Edges) -> dict[int, dict[int, float]]:
    sends: dict[int, dict[int, float]] = {}
    for (a, b), share in edges.items():
        sends.setdefault(a, {})[b] = sends.setdefault(b, {})[a] = round_share(share)
    return sends


def _base_rounds(ranks: Sequence[int], base: int) -> list[Edges]:
    """Return the shorter schedule: one Simple Base graph, or parts whose averages are averaged."""
    whole = _simple_rounds(ranks, base)
    num_parts = _smooth_part(len(ranks), base)
    size = len(ranks) // num_parts
    parts = [ranks[i * size : (i + 1) * size] for i in range(num_parts)]
    rounds: list[Edges] = []
    for part in parts:
        _merge_rounds(rounds, 0, _simple_rounds(part, base))
    begin = len(rounds)
    for column in zip(*parts, strict=True):
        _merge_rounds(rounds, begin, _smooth_rounds(column, base))
    return min(whole, rounds, key=len)


def _simple_rounds(ranks: Sequence[int], base: int) -> list[Edges]:
    """Return the rounds of the Simple Base-(k+1) graph.

    The ranks form groups of a * base**p ranks, one for each digit of their number in this base.
    First each group averages internally. Then each group in turn exchanges with all smaller groups,
    which gives those their final value and each of its own a blocks the final average; a last
    average within each block completes the group.
    """
    if _factors(len(ranks), base) is not None:
        return _smooth_rounds(ranks, base)
    groups = _split(ranks, base)
    rounds: list[Edges] = []
    for _, group in groups:
        _merge_rounds(rounds, 0, _smooth_rounds(group, base))
    begin = len(_smooth_rounds(groups[0][1], base))
    for index, (digit, group) in enumerate(groups[:-1]):
        later = [rank for _, other in groups[index + 1 :] for rank in other]
        size = len(group) // digit
        blocks = [group[b * size : (b + 1) * size] for b in range(digit)]
        share = size / (len(group) + len(later))
        exchange = {
            (block[index], rank): share for index, rank in enumerate(later) for block in blocks
        }
        _merge_rounds(rounds, begin + index, [exchange])
        for block in blocks:
            _merge_rounds(rounds, begin + index + 1, _smooth_rounds(block, base))
    return rounds


def _smooth_rounds(ranks: Sequence[int], base: int) -> list[Edges]:
    """Return the rounds of the hyper-hypercube: round i averages ranks that differ in digit i."""
    rounds: list[Edges] = []
    stride = 1
    for factor in _factors(len(ranks), base) or ():
        edges: Edges = {}
        for index, rank in enumerate(ranks):
            digit = index // stride % factor
            for other in range(digit + 1, factor):
                edges[rank, ranks[index + (other - digit) * stride]] = 1 / factor
        rounds.append(edges)
        stride *= factor
    return rounds


def _merge_rounds(rounds: list[Edges], begin: int, others: list[Edges]) -> None:
    """Add the edges of ``others`` to ``rounds`` from index ``begin``, in place."""
    while len(rounds) < begin + len(others):
        rounds.append({})
    for index, edges in enumerate(others):
        rounds[begin + index].update(edges)


@functools.cache
def _factors(number: int, largest: int) -> tuple[int, ...] | None:
    """Return the fewest factors of a number that are at most ``largest``, or None."""
    if number == 1:
        return ()
    remaining = {
        factor: _factors(number // factor, largest)
        for factor in range(largest, 1, -1)
        if number % factor == 0
    }
    found = [(factor, *rest) for factor, rest in remaining.items() if rest is not None]
    return min(found, key=len, default=None)


def _smooth_part(number: int, base: int) -> int:
    """Return the largest divisor of a number without prime factors above the base."""
    smooth = 1
    for factor in range(2, base + 1):
        while number % factor == 0:
            number //= factor
            smooth *= factor
    return smooth


def _split(ranks: Sequence[int], base: int) -> list[tuple[int, Sequence[int]]]:
    power = 1
    while power * base <= len(ranks):
        power *= base
    groups, begin = [], 0
    while begin < len(ranks):
        digit = (len(ranks) - begin) // power
        if digit:
            groups.append((digit, ranks[begin : begin + digit * power]))
            begin += digit * power
        power //= base
    return groups
