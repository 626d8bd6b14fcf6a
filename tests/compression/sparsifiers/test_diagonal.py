"""Diagonals by parameter name: their values for a buffer, equality and repr."""

import pytest
import torch

from pyparallel.compression import BufferLayout, Diagonal, Piece

LAYOUT = BufferLayout((Piece("fc.weight", (2, 3)), Piece("fc.bias", (2,)), Piece("gain", ())))


def test_the_first_matching_pattern_applies_and_tensors_are_broadcast():
    diagonal = Diagonal({"*.weight": torch.tensor([[2.0], [3.0]]), "*.bias": 5.0, "*": 7})
    found = diagonal.of(LAYOUT)
    assert found.dtype == torch.float64
    assert found.tolist() == [2, 2, 2, 3, 3, 3, 5, 5, 7]
    assert Diagonal({"*": 1.0, "gain": 2.0}).of(LAYOUT).tolist() == [1.0] * 9
    assert Diagonal({"*": 1.0}).of(BufferLayout(())).shape == (0,)


def test_the_repr_of_numbers_round_trips():
    diagonal = Diagonal({"*.bias": 0.1, "*": torch.tensor(2.0)})
    assert repr(diagonal) == "Diagonal({'*.bias': 0.1, '*': 2.0})"
    assert eval(repr(diagonal)) == diagonal


def test_tensors_print_their_shape_and_a_digest_that_any_entry_changes():
    values = torch.arange(1.0, 7).view(2, 3)
    one = Diagonal({"*": values})
    assert repr(one).startswith("Diagonal({'*': <[2, 3] ")
    assert one == Diagonal({"*": values.double()})
    assert hash(one) == hash(Diagonal({"*": values.clone()}))
    for place in range(6):
        other = values.clone()
        other.view(-1)[place] *= 1 + 2**-20
        assert repr(Diagonal({"*": other})) != repr(one)
    assert one != Diagonal({"*": values.view(3, 2)})
    assert one != Diagonal({"a*": values})
    assert one != repr(one)


def test_values_are_copied():
    values = torch.ones(2, 3)
    diagonal = Diagonal({"*": values})
    text = repr(diagonal)
    values.fill_(9)
    assert diagonal.of(BufferLayout((Piece("a", (2, 3)),))).tolist() == [1.0] * 6
    assert repr(diagonal) == text
    again = torch.full((3,), 4.0, dtype=torch.float64)
    kept = Diagonal({"*": again})
    kept.of(BufferLayout.flat(3)).fill_(9)
    assert kept.of(BufferLayout.flat(3)).tolist() == [4.0] * 3


def test_values_without_inverse_root_are_rejected(subtests):
    for bad in [0.0, -1.0, float("nan"), float("inf")]:
        with subtests.test(str(bad)):
            with pytest.raises(
                ValueError, match=f"values must be finite and > 0, got {bad:g} for '\\*'"
            ):
                Diagonal({"*": torch.tensor([1.0, bad, 1.0])})
            with pytest.raises(ValueError, match="values must be finite and > 0"):
                Diagonal({"*": bad})


def test_mismatched_values_are_rejected():
    with pytest.raises(ValueError, match="values must not be empty"):
        Diagonal({})
    with pytest.raises(
        ValueError, match=r"got none for 'fc\.bias' in .*add \"\*\" as the last pattern"
    ):
        Diagonal({"*.weight": 1.0}).of(LAYOUT)
    with pytest.raises(ValueError, match=r"got \[4\] for '\*', but fc\.weight has shape \[2, 3\]"):
        Diagonal({"*": torch.ones(4)}).of(LAYOUT)
