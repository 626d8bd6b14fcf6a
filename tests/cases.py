"""Which rows of a product of cases the fast tests take, and which are slow."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a row of ``pytest.mark.parametrize`` that `make test-slow` alone runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: Any) -> Any:
    """Return a row of ``pytest.mark.parametrize`` that `make test-nightly` alone runs."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.nightly])


def slow_unless(fast: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return the values as rows, of which those that are not among the fast ones are slow."""
    return [value if value in fast else slow(value) for value in values]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Choose rows of the axes' product, greedily, until any two values of two axes have met."""
    rows = list(product(*axes))
    chosen = []
    meetings = [
        set(combinations(enumerate(places), 2))
        for places in product(*(range(len(a)) for a in axes))
    ]
    while any(meetings):
        best = max(range(len(rows)), key=lambda i: len(meetings[i]))
        chosen.append(rows[best])
        met = meetings[best]
        meetings = [each - met for each in meetings]
    return chosen
