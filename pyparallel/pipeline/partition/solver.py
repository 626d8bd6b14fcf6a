"""The solver of the partition problem: how to split layers of given costs into stages."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np

from ...training.arguments import require

Split = tuple[int, ...]


def balance(
    costs: Sequence[float],
    num_stages: int,
    memory: Sequence[float] | Sequence[Sequence[float]] | None = None,
    limit: float | None = None,
    num_ranks: int | None = None,
) -> Split:
    """Return the split with the minimal time of the slowest stage. Exact for one stage per rank.

    Ties are broken by the second slowest stage, then the third, and so on; then by fewer layers on
    the first stage, then the second: in 1F1B earlier stages hold more microbatches.

    With several stages on a rank (stage s on rank s mod ranks) a local search for the minimal time
    of the slowest rank starts from this split: each move shifts one or more adjacent boundaries by
    one layer, and the best move is made as long as it makes the slowest rank faster (or, on ties,
    the second slowest, and so on). The result may be a local optimum.

    Args:
        costs: time of each layer, forward and backward, in any one unit.
        num_stages: at most the number of layers.
        memory: of each layer, (layers,); or (stages, layers), if it depends on how many
            microbatches a stage holds.
        limit: the memory of a stage's layers together, at most, in the unit of ``memory``.
        num_ranks: a divisor of ``num_stages``; None: one stage per rank.

    Returns:
        The first layer of stages 1, 2, ...: ``num_stages - 1`` ascending indices.

    Raises:
        ValueError: the sizes do not match, a number is negative or not finite, or no split is
            within the limit; the message has the smallest possible limit.
    """
    check_num_stages(len(costs), num_stages)
    num_ranks = num_stages if num_ranks is None else num_ranks
    fits = num_ranks >= 1 and num_stages % num_ranks == 0
    require(fits, f"num_ranks must divide {num_stages} stages", num_ranks)
    if (memory is None) != (limit is None):
        raise ValueError(
            f"memory and limit must be given together, got {memory!r} and limit {limit!r}"
        )
    time = _as_resource("costs", np.asarray(costs, dtype=np.float64), num_stages)
    bounds: list[_Resource] = []
    if memory is not None and limit is not None:
        amounts = np.asarray(memory, dtype=np.float64)
        bounds = [_memory_bound(amounts, limit, len(costs), num_stages)]
    split = _most_even_split(_minimize_cap(time, bounds), bounds)
    return split if num_ranks == num_stages else _local_search(split, time, bounds, num_ranks)


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Raise a ValueError if there are fewer layers than stages."""
    if not isinstance(num_stages, int) or not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"num_stages must be from 1 to the number of layers, got {num_stages!r} stages for "
            f"{num_layers} layers: use fewer stages, or divide the model into more layers"
        )


@dataclass(frozen=True)
class _Resource:
    """A resource that layers use, time or memory, with its cap per stage.

    In integers, as multiples of 1 / ``scale``, so that sums are exact.

    Args:
        sums: for each stage the prefix sums of the layers' use in it.
        scale: integer units per unit of the user.
    """

    sums: list[list[int]]
    scale: int
    cap: int

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.sums)

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.sums[0]) - 1

    def of(self, stage: int, begin: int, end: int) -> int:
        """Return the use of layers ``begin`` to ``end`` in a stage."""
        return self.sums[stage][end] - self.sums[stage][begin]

    def fits(self, stage: int, begin: int, end: int) -> bool:
        """Return whether that is within the cap."""
        return self.of(stage, begin, end) <= self.cap

    def furthest(self, stage: int, begin: int) -> int:
        """Return the largest end of a stage that begins here; ``begin``, if no layer fits."""
        sums = self.sums[stage]
        return bisect_right(sums, sums[begin] + self.cap) - 1


def _as_resource(name: str, amounts: np.ndarray, num_stages: int) -> _Resource:
    """Create an uncapped resource from amounts (layers,) or (stages, layers)."""
    fits = np.isfinite(amounts).all() and (amounts >= 0).all()
    require(fits, f"{name} must be finite and not negative", f"{amounts.tolist()}")
    rows = np.broadcast_to(amounts, (num_stages, amounts.shape[-1])).tolist()
    exact = [[Fraction(value) for value in row] for row in rows]
    scale = math.lcm(*(value.denominator for row in exact for value in row))
    sums = [list(accumulate((int(v * scale) for v in row), initial=0)) for row in exact]
    return _Resource(sums, scale, max(row[-1] for row in sums))


def _memory_bound(amounts: np.ndarray, limit: float, num_layers: int, num_stages: int) -> _Resource:
    if amounts.shape not in {(num_layers,), (num_stages, num_layers)}:
        raise ValueError(
            f"memory must be one number for each of {num_layers} layers, or {num_stages} rows of "
            f"that, got shape {amounts.shape}"
        )
    resource = _as_resource("memory", amounts, num_stages)
    require(math.isfinite(limit) and limit >= 0, "limit must be finite and not negative", limit)
    capped = replace(resource, cap=math.floor(Fraction(limit) * resource.scale))
    if not _is_possible([capped]):
        least = Fraction(_minimize_cap(resource, []).cap, resource.scale)
        raise ValueError(
            f"limit must be at least {float(least):.17g}, got {limit!r}: in any split of "
            f"{num_layers} layers into {num_stages} stages one of them takes that much"
        )
    return capped


def _minimize_cap(resource: _Resource, bounds: list[_Resource]) -> _Resource:
    """Return the resource with the smallest cap that some split within the bounds allows."""
    low, high = 0, resource.cap
    while low < high:
        middle = (low + high) // 2
        if _is_possible([replace(resource, cap=middle), *bounds]):
            high = middle
        else:
            low = middle + 1
    return replace(resource, cap=low)


def _is_possible(resources: list[_Resource]) -> bool:
    ends = _begins(resources)[-1]
    return bool(ends) and ends[-1] == resources[0].num_layers


def _begins(resources: list[_Resource]) -> list[list[int]]:
    """Return for each stage the layers at which it can begin; then those where the last can end.

    In ascending order. Only the caps of the previous stages are considered.
    """
    begins = [[0]]
    for stage in range(resources[0].num_stages):
        ends: list[int] = []
        for begin in begins[-1]:
            # A later begin only adds ends after those known: each end is added once.
            known = max(begin, ends[-1] if ends else 0)
            ends.extend(range(known + 1, _furthest(resources, stage, begin) + 1))
        begins.append(ends)
    return begins


def _furthest(resources: list[_Resource], stage: int, begin: int) -> int:
    return min(resource.furthest(stage, begin) for resource in resources)


def _most_even_split(time: _Resource, bounds: list[_Resource]) -> Split:
    """Return the split within the caps whose times, in descending order, are the smallest."""
    resources = [time, *bounds]
    # By first layer of a stage: the sorted times and the ends of this and all later stages.
    best: dict[int, tuple[Split, Split]] = {time.num_layers: ((), ())}
    begins = _begins(resources)
    for stage in reversed(range(time.num_stages)):
        best = {
            begin: min(choices)
            for begin in begins[stage]
            if (choices := list(_choices(resources, stage, begin, best)))
        }
    return best[0][1][:-1]


def _choices(
    resources: list[_Resource], stage: int, begin: int, best: dict[int, tuple[Split, Split]]
) -> Iterator[tuple[Split, Split]]:
    """Yield, for each end of the stage that begins here, the best completion."""
    for end in range(begin + 1, _furthest(resources, stage, begin) + 1):
        if end in best:
            times, ends = best[end]
            used = resources[0].of(stage, begin, end)
            yield tuple(sorted((*times, used), reverse=True)), (end, *ends)


def _local_search(split: Split, time: _Resource, bounds: list[_Resource], num_ranks: int) -> Split:
    while True:
        best = min(
            _neighbors(split, time, bounds), key=lambda each: _rank_times(each, time, num_ranks)
        )
        if _rank_times(best, time, num_ranks) >= _rank_times(split, time, num_ranks):
            return split
        split = best


def _neighbors(split: Split, time: _Resource, bounds: list[_Resource]) -> Iterator[Split]:
    """Yield the split, and the valid ones that are one move away."""
    yield split
    for first in range(len(split)):
        for last in range(first, len(split)):
            for step in (-1, 1):
                run = (cut + step for cut in split[first : last + 1])
                moved = (*split[:first], *run, *split[last + 1 :])
                if _is_allowed(moved, time, bounds):
                    yield moved


def _is_allowed(split: Split, time: _Resource, bounds: list[_Resource]) -> bool:
    stages = list(enumerate(pairwise((0, *split, time.num_layers))))
    return all(begin < end for _, (begin, end) in stages) and all(
        resource.fits(stage, begin, end) for resource in bounds for stage, (begin, end) in stages
    )


def _rank_times(split: Split, time: _Resource, num_ranks: int) -> list[int]:
    """Return the total time of each rank's stages, in descending order."""
    times = [0] * num_ranks
    for stage, (begin, end) in enumerate(pairwise((0, *split, time.num_layers))):
        times[stage % num_ranks] += time.of(stage, begin, end)
    return sorted(times, reverse=True)
