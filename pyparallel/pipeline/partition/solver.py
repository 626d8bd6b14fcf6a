"""The solver of the partition problem: how to split layers of given costs into stages."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from ...training.arguments import require

Split = tuple[int, ...]


def balance(costs: Sequence[float], num_stages: int, num_ranks: int | None = None) -> Split:
    """Return the first layer of stages 1, 2, ... with the minimal time of the slowest stage.

    Exact for one stage per rank. Ties are broken by the second slowest stage, and so on; then by
    fewer layers on the first stage, then the second: in 1F1B earlier stages hold more microbatches.
    With several on a rank (``num_ranks``, a divisor of ``num_stages``; None: one each) a local
    search from this split shifts adjacent boundaries by one layer as long as that makes the slowest
    rank faster. ``costs`` are times of layers, forward and backward, in any one unit.
    """
    check_num_stages(len(costs), num_stages)
    num_ranks = num_stages if num_ranks is None else num_ranks
    fits = num_ranks >= 1 and num_stages % num_ranks == 0
    require(fits, f"num_ranks must divide {num_stages} stages", num_ranks)
    fits = all(0 <= cost < math.inf for cost in costs)
    require(fits, "costs must be finite and not negative", str(list(map(float, costs))))
    sums = _exact_sums(costs)
    split = _most_even_split(sums, _smallest_cap(sums, num_stages), num_stages)
    return split if num_ranks == num_stages else _local_search(split, sums, num_ranks)


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Raise a ValueError if there are fewer layers than stages."""
    got = f"{num_stages!r} stages for {num_layers} layers"
    fits = isinstance(num_stages, int) and 1 <= num_stages <= num_layers
    fix = "use fewer stages, or divide the model into more layers"
    require(fits, "num_stages must be from 1 to the number of layers", f"{got}: {fix}")


def _exact_sums(costs: Sequence[float]) -> list[int]:
    """Return the prefix sums of the costs, in a unit in which all are integers."""
    exact = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(each.denominator for each in exact))
    return list(accumulate((int(each * scale) for each in exact), initial=0))


def _smallest_cap(sums: Sequence[int], num_stages: int) -> int:
    """Return the least time that no stage of some split exceeds."""
    low, high = 0, sums[-1]
    while low < high:
        middle = (low + high) // 2
        ends = _begins(sums, middle, num_stages)[-1]
        if ends and ends[-1] == len(sums) - 1:
            high = middle
        else:
            low = middle + 1
    return low


def _begins(sums: Sequence[int], cap: int, num_stages: int) -> list[list[int]]:
    """Return for each stage where it can begin, ascending; then where the last one can end."""
    begins = [[0]]
    for _ in range(num_stages):
        ends: list[int] = []
        for begin in begins[-1]:
            # A later begin only adds ends after those known: each end is added once.
            known = max(begin, ends[-1] if ends else 0)
            ends.extend(range(known + 1, _furthest(sums, cap, begin) + 1))
        begins.append(ends)
    return begins


def _furthest(sums: Sequence[int], cap: int, begin: int) -> int:
    """Return the largest end of a stage that begins here; ``begin``, if no layer fits."""
    return bisect_right(sums, sums[begin] + cap) - 1


def _most_even_split(sums: Sequence[int], cap: int, num_stages: int) -> Split:
    """Return the split within the cap whose times, in descending order, are the smallest."""
    # By first layer of a stage: the sorted times and the ends of this and all later stages.
    best: dict[int, tuple[Split, Split]] = {len(sums) - 1: ((), ())}
    begins = _begins(sums, cap, num_stages)
    for stage in reversed(range(num_stages)):
        best = {
            begin: min(choices)
            for begin in begins[stage]
            if (choices := list(_choices(sums, cap, begin, best)))
        }
    return best[0][1][:-1]


def _choices(
    sums: Sequence[int], cap: int, begin: int, best: dict[int, tuple[Split, Split]]
) -> Iterator[tuple[Split, Split]]:
    """Yield, for each end of the stage that begins here, the best completion."""
    for end in range(begin + 1, _furthest(sums, cap, begin) + 1):
        if end in best:
            times, ends = best[end]
            yield tuple(sorted((*times, sums[end] - sums[begin]), reverse=True)), (end, *ends)


def _local_search(split: Split, sums: Sequence[int], num_ranks: int) -> Split:
    while True:
        best = min(_neighbors(split, sums), key=lambda each: _rank_times(each, sums, num_ranks))
        if _rank_times(best, sums, num_ranks) >= _rank_times(split, sums, num_ranks):
            return split
        split = best


def _neighbors(split: Split, sums: Sequence[int]) -> Iterator[Split]:
    """Yield the split, and the valid ones that are one move away."""
    yield split
    for first in range(len(split)):
        for last in range(first, len(split)):
            for step in (-1, 1):
                run = (cut + step for cut in split[first : last + 1])
                moved = (*split[:first], *run, *split[last + 1 :])
                if all(begin < end for begin, end in pairwise((0, *moved, len(sums) - 1))):
                    yield moved


def _rank_times(split: Split, sums: Sequence[int], num_ranks: int) -> list[int]:
    """Return the total time of each rank's stages, in descending order."""
    times = [0] * num_ranks
    for stage, (begin, end) in enumerate(pairwise((0, *split, len(sums) - 1))):
        times[stage % num_ranks] += sums[end] - sums[begin]
    return sorted(times, reverse=True)
