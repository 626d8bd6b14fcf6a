import pytest
import torch

from pyparallel.compression import BufferLayout, Natural

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")


def encode(x, residual=None):
    return Natural().compress(x, Natural().init(BufferLayout.flat(len(x)), CPU), residual)


def decode(message):
    numel = len(message[0])
    return Natural().decompress(message, BufferLayout.flat(numel), torch.empty(numel))


def test_powers_of_two_are_exact():
    powers = 2.0 ** torch.arange(-80, 45)
    x = torch.cat([torch.zeros(1), powers, -powers])
    (codes,) = encode(x)
    assert codes.tolist() == [0, *range(1, 126), *range(129, 254)]
    assert torch.equal(decode((codes,)), x)


def test_one_of_the_two_neighbors_is_drawn(subtests):
    for x in [1.25, -1.5, 3.9, 1.0001e-20, 2.0**-80 * 0.3, -1e-40, 1.1e13]:
        with subtests.test(str(x)):
            many = torch.full((20_000,), x)
            decoded = decode(encode(many)).double()
            below = (
                2.0 ** max(-81, torch.tensor(x).abs().log2().floor().item())
                if abs(x) > 2**-80
                else 0
            )
            above = max(2 * below, 2.0**-80)
            assert set(decoded.abs().tolist()) <= {below, above}
            assert float(decoded.mean()) == pytest.approx(
                float(many[0]), abs=5 * (above - below) / 2 / 20_000**0.5
            )


def test_overflow_is_inf():
    x = torch.tensor([1.8e13, -3e38, INF, -INF, 2.0**44])
    assert decode(encode(x)).tolist() == [INF, -INF, INF, -INF, 2.0**44]
    assert decode(encode(torch.tensor([NAN, -NAN]))).isnan().all()


def test_non_finite_entries_leave_the_residual_unchanged():
    residual = torch.tensor([0.5, 0.25, 0.125, 0.5, 1.0])
    encode(torch.tensor([NAN, -INF, 1e20, 0.5, 0.5]), residual)
    assert residual[:4].tolist() == [0.5, 0.25, 0.125, 0.0]
    assert residual[4] in (0.5, -0.5)
