"""Indices of chosen units along a dimension."""

import torch

from pyparallel.subnets import Place


def test_units_of_one_entry():
    assert Place("w", 0).entries(torch.tensor([1, 3]), 4).tolist() == [1, 3]


def test_units_of_several_neighbors():
    place = Place("w", 1, unit_size=3)
    assert place.length(4) == 12
    assert place.entries(torch.tensor([0, 2]), 4).tolist() == [0, 1, 2, 6, 7, 8]


def test_units_that_come_in_blocks():
    place = Place("qkv", 0, unit_size=2, blocks=3)
    assert place.length(3) == 18
    assert place.entries(torch.tensor([2]), 3).tolist() == [4, 5, 10, 11, 16, 17]
