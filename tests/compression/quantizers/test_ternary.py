import pytest
import torch

from benchmarks.theory.contraction import contraction
from pyparallel.compression import BufferLayout, Ternary

CPU = torch.device("cpu")
SMALL = Ternary(block_size=32)


def encode(x, residual=None, seed=0):
    compressor = Ternary(block_size=32, seed=seed)
    return compressor.compress(x, compressor.init(BufferLayout.flat(len(x)), CPU), residual)


def decode(message, numel):
    return SMALL.decompress(message, BufferLayout.flat(numel), torch.empty(numel))


def test_deterministic_entries_are_exact():
    x = torch.tensor([2.0, 0.0, -2.0, 0.0, -2.0, 2.0])
    codes, scales = encode(x)
    assert codes.tolist() == [0b00_10_00_01, 0b01_10]
    assert scales.tolist() == [2.0]
    assert decode((codes, scales), 6).tolist() == x.tolist()


def test_each_block_has_its_scale():
    x = torch.cat([torch.full((32,), -3.0), torch.full((5,), 0.25)])
    assert decode(encode(x), 37).tolist() == x.tolist()


def test_entries_are_drawn_in_proportion_to_their_magnitude(subtests):
    for scale in [1e-30, 1.0, 3e38]:
        with subtests.test(str(scale)):
            x = torch.full((32 * 500,), 0.25 * scale)
            x[::32] = scale
            sent = decode(encode(x), len(x)).view(-1, 32) != 0
            assert sent[:, 0].all()
            share = float(sent[:, 1:].float().mean())
            assert share == pytest.approx(float(x[1] / x[0]), abs=5 * (0.1875 / (31 * 500)) ** 0.5)


def test_with_a_residual_the_scale_minimizes_the_error():
    x = torch.randn(32, generator=torch.Generator().manual_seed(0))
    residual = torch.zeros(32)
    codes, scales = encode(x, residual)
    decoded = decode((codes, scales), 32)
    assert torch.equal(residual, x - decoded)
    for factor in (0.99, 1.01):
        assert (x - factor * decoded).norm() > residual.norm()
    alone = decode(encode(x), 32)
    assert torch.equal(alone.sign(), decoded.sign())
    assert alone.abs().max() == x.abs().max()


def test_the_worst_block_loses_little_less_than_is_declared():
    """Many blocks with the worst-case magnitude of small entries."""
    x = torch.full((2000, 32), 1 / (1 + 32**0.5))
    x[:, 0] = 1.0
    residual = torch.zeros(x.numel())
    encode(x.flatten(), residual)
    lost = float(residual.square().sum() / x.square().sum())
    delta = contraction(SMALL, BufferLayout.flat(1000))
    assert delta == 2 / (1 + 32**0.5)
    assert 0.9 * (1 - delta) < lost <= 1 - delta
