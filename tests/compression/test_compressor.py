"""What a new compressor needs: two methods; everything else has a default."""

from dataclasses import dataclass

import pytest
import torch

from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Collectives,
    Compressor,
    ErrorFeedback,
    Int8,
    TopK,
)
from tests.workers import on_ranks

LAYOUT = BufferLayout.flat(5)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Tenths(Compressor):
    """Whole tenths, rounded down."""

    def encode(self, x, state):
        return ((x * 10).floor(),)

    def decode(self, message, layout):
        return message[0] / 10


@on_ranks(2)
def test_two_methods_make_a_compressor(rank):
    assert not Tenths().unbiased
    assert Tenths().fixed_length
    assert all(Tenths().error_at(place) is None for place in AttachPoint)
    compressor = ErrorFeedback(Tenths())
    state = compressor.init(LAYOUT, CPU, rank)
    for mean in (0.7, 0.8):  # of 0.2 and 1.2, and of 0.3 and 1.3
        x = torch.full((5,), 0.25 + rank)
        compressor.mean_(x, state, Collectives())
        torch.testing.assert_close(x, torch.full((5,), mean))
    assert state.inner[0].step == 2


def test_a_buffer_of_another_layout_is_rejected_and_not_counted():
    state = Tenths().init(LAYOUT, CPU)
    with pytest.raises(ValueError, match="x must be a contiguous buffer of 5 entries"):
        Tenths().compress(torch.ones(4), state)
    assert state.step == 0


def test_only_compressors_can_be_wrapped(subtests):
    for wrapped in (TopK, None, {"*": Int8()}):
        sentence = r"must be an object such as Int8\(\) or TopK\(0.01\), got"
        with subtests.test(str(wrapped)), pytest.raises(TypeError, match=sentence):
            ErrorFeedback(wrapped)


def test_a_decay_is_in_0_to_1_and_part_of_what_ranks_compare(subtests):
    for decay in (-0.1, 1.1, float("nan")):
        with (
            subtests.test(f"{decay}"),
            pytest.raises(ValueError, match=r"decay must be in \[0, 1\]"),
        ):
            ErrorFeedback(TopK(0.1), decay=decay)
    # As it was before there were decays: saved states have it.
    assert repr(ErrorFeedback(TopK(0.1))) == "ErrorFeedback(compressor=TopK(density=0.1))"
    decayed = ErrorFeedback(TopK(0.1), decay=0.9)
    assert repr(decayed) == "ErrorFeedback(compressor=TopK(density=0.1), decay=0.9)"
    assert eval(repr(decayed)) == decayed != ErrorFeedback(TopK(0.1))
