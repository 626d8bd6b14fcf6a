"""The automatic split against all possible splits."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.pipeline.partition.solver import balance


def stages_of(split, values):
    return [values[begin:end] for begin, end in pairwise((0, *split, len(values)))]


def ordered_times(split, costs, num_ranks=None):
    """Return the times of the ranks, the slowest first."""
    stages = [sum(stage) for stage in stages_of(split, costs)]
    num_ranks = num_ranks or len(stages)
    return sorted((sum(stages[rank::num_ranks]) for rank in range(num_ranks)), reverse=True)


def every_split(num_layers, num_stages):
    return combinations(range(1, num_layers), num_stages - 1)


SIZES = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
EXACT = st.integers(0, 9)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.data())
def test_no_split_is_better(sizes, data):
    num_layers, num_stages = sizes
    costs = data.draw(st.lists(EXACT, min_size=num_layers, max_size=num_layers))
    best = min(
        every_split(num_layers, num_stages), key=lambda split: (ordered_times(split, costs), split)
    )
    assert balance(costs, num_stages) == best


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=4, max_size=9), st.integers(1, 4))
def test_measured_times(costs, num_stages):
    found = ordered_times(balance(costs, num_stages), costs)
    best = min(ordered_times(split, costs) for split in every_split(len(costs), num_stages))
    assert found[0] == pytest.approx(best[0])


def test_equal_layers_are_split_evenly_at_any_cost():
    # Sums of a tenth, rounded, would differ.
    assert balance([0.1] * 12, 4) == (3, 6, 9)
    assert balance([0.1] * 7, 3) == (2, 4)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 3), st.integers(2, 3), st.data())
def test_several_stages_on_a_rank(num_ranks, stages_per_rank, data):
    num_stages = num_ranks * stages_per_rank
    costs = data.draw(st.lists(EXACT, min_size=num_stages, max_size=num_stages + 3))
    split = balance(costs, num_stages, num_ranks=num_ranks)
    assert all(stages_of(split, costs))
    assert len(split) == num_stages - 1
    begun = ordered_times(balance(costs, num_stages), costs, num_ranks)
    found = ordered_times(split, costs, num_ranks)
    assert found <= begun
    for moved in moves(split, len(costs)):
        assert found <= ordered_times(moved, costs, num_ranks)


def moves(split, num_layers):
    """Return all splits that move consecutive boundaries by one layer."""
    steps = [
        [step if first <= cut < last else 0 for cut in range(len(split))]
        for first, last in combinations(range(len(split) + 1), 2)
        for step in (-1, 1)
    ]
    found = [tuple(np.add(split, each).tolist()) for each in steps]
    return [each for each in found if all(a < b for a, b in pairwise((0, *each, num_layers)))]


def test_a_rank_with_a_heavy_stage_gets_a_light_one():
    costs = [40, 5, 5, 5, 5, 5, 5, 5]
    assert ordered_times(balance(costs, 4), costs, 2) == [50, 25]
    assert ordered_times(balance(costs, 4, num_ranks=2), costs, 2) == [45, 30]
    assert balance(costs, 4, num_ranks=2) == (1, 4, 5)


NUMBER = "num_stages must be from 1 to the number of layers, got"
NAN = float("nan")


BAD_ARGUMENTS = [
    (([1, 2], 3), f"{NUMBER} 3 stages for 2 layers: use fewer stages, or divide the model into"),
    (([1, 2], 0), f"{NUMBER} 0 stages for 2 layers"),
    (([1, 2], 1.0), f"{NUMBER} 1.0 stages for 2 layers"),
    (([1, -2], 2), r"costs must be finite and not negative, got \[1.0, -2.0\]"),
    (([1, NAN], 2), "costs must be finite and not negative, got"),
    (([1] * 4, 4, 3), "num_ranks must divide 4 stages, got 3"),
    (([1] * 4, 4, 0), "num_ranks must divide 4 stages, got 0"),
]


def test_bad_arguments_are_refused_in_one_sentence(subtests):
    for arguments, sentence in BAD_ARGUMENTS:
        with (
            subtests.test(arguments=arguments, sentence=sentence),
            pytest.raises(ValueError, match=f"^{sentence}"),
        ):
            balance(*arguments)
