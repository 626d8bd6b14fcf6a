import pytest
import torch

from benchmarks.theory.contraction import contraction
from pyparallel.compression import BufferLayout, Sign

CPU = torch.device("cpu")


def decode(compressor, x, residual=None):
    layout = BufferLayout.flat(len(x))
    message = compressor.compress(x, compressor.init(layout, CPU), residual)
    assert tuple(map(len, message)) == compressor.sizes(len(x))
    return compressor.decompress(message, layout, torch.empty(len(x)))


def test_entries_become_the_mean_magnitude_of_their_block():
    x = torch.cat([torch.full((32,), -3.0), torch.tensor([4.0, -1.0, 1.0])])
    assert decode(Sign(block_size=32), x).tolist() == [-3.0] * 32 + [2.0, -2.0, 2.0]


def test_a_single_nonzero_entry_is_the_worst_case():
    x = torch.zeros(1024)
    x[5] = 3.0
    lost = (decode(Sign(), x) - x).square().sum() / x.square().sum()
    assert float(lost) == pytest.approx(1 - contraction(Sign(), BufferLayout.flat(5000)), rel=1e-5)
