import pytest
import torch

from benchmarks.theory.contraction import contraction
from pyparallel.compression import QSGD, BufferLayout, Int4, Int8

CPU = torch.device("cpu")
LAYOUT = BufferLayout.flat(301)


def test_messages_are_those_of_seeded_integers(subtests):
    for compressor, same in [(QSGD(seed=5), Int8(seed=5)), (QSGD(4), Int4(seed=0))]:
        with subtests.test(str(compressor)):
            x = torch.randn(301, generator=torch.Generator().manual_seed(0))
            messages = [each.compress(x, each.init(LAYOUT, CPU)) for each in (compressor, same)]
            assert all(torch.equal(*pair) for pair in zip(*messages, strict=True))
            assert compressor.sizes(301) == same.sizes(301)
            assert contraction(compressor, LAYOUT) == contraction(same, LAYOUT)


def test_other_bits_are_rejected():
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 2"):
        QSGD(2)
