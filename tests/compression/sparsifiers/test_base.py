"""Checks of sparse messages, and propagation of nan and inf that are not sent."""

from itertools import product

import pytest
import torch

from pyparallel.compression import Chain, CorruptMessageError, Int8, PermK, RandomK, Threshold, TopK
from pyparallel.compression.layout import BufferLayout
from pyparallel.compression.sparsifiers.base import Sparsifier, check_numbers, propagate_nonfinite_


def test_numbers_are_non_negative_integers():
    check_numbers(torch.tensor([0, 5]), 2)
    for wrong in ([0], [0, -1], [0.0, 1.0], [[0, 1]]):
        with pytest.raises(CorruptMessageError, match="numbers must be 2 non-negative int64"):
            check_numbers(torch.tensor(wrong), 2)


def test_unsent_non_finite_entries_show_in_all_values(subtests):
    for bad in [float("nan"), float("inf"), float("-inf")]:
        with subtests.test(str(bad)):
            x = torch.tensor([1.0, bad, 2.0])
            assert propagate_nonfinite_(torch.ones(2), x).isnan().all()
            assert propagate_nonfinite_(torch.ones(2), x.bfloat16()).isnan().all()


def test_finite_entries_change_no_value(subtests):
    for x in [[], [3e38, -3e38], [1e-45, 0.0]]:
        with subtests.test(str(x)):
            assert propagate_nonfinite_(torch.tensor([1.0, -2.0]), torch.tensor(x)).tolist() == [
                1.0,
                -2.0,
            ]
            assert propagate_nonfinite_(torch.empty(0), torch.tensor(x)).numel() == 0


def test_the_number_of_values_follows_from_the_other_tensors(subtests):
    sparsifiers = [
        TopK(0.1),
        RandomK(0.1),
        Threshold(1.0),
        PermK(num_ranks=3),
    ]
    for sparsifier, numel in product(
        sparsifiers,
        [0, 1, 500],
    ):
        with subtests.test(f"{sparsifier} {numel}"):
            assert isinstance(sparsifier, Sparsifier)
            layout = BufferLayout.flat(numel)
            state = sparsifier.init(layout, torch.device("cpu"))
            values, *where = sparsifier.compress(torch.randn(numel), state)
            assert values.numel() == sparsifier.num_values(tuple(where), layout)
            assert Chain(sparsifier, Int8()).first is sparsifier
