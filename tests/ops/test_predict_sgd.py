"""``predict_sgd``: samples for the parity harness, and tests of this op alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import predict_sgd
from pyparallel.ops.predict_sgd import predict_sgd_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    assert_parity,
    assert_refused,
    double,
    each_implementation,
    fuzz,
)

NAMES = ("param", "momentum_buffer", "lr", "horizon", "out")


def sample(numel, *, dtypes=(torch.float32,) * 3, scale=1.0, horizon=3.0):
    generator = torch.Generator().manual_seed(numel)
    param, buffer = (scale * torch.randn(numel, generator=generator) for _ in range(2))
    out = torch.full((numel,), float("nan"), dtype=dtypes[2])
    return param.to(dtypes[0]), buffer.to(dtypes[1]), double(0.1), double(horizon), out


def parity(implementation, arguments):
    assert_parity(implementation, "predict_sgd", predict_sgd_reference, arguments)


@each_implementation
def test_lengths(implementation):
    for numel in implementation.lengths:
        parity(implementation, sample(numel))


@each_implementation
def test_dtypes(implementation):
    for dtypes in implementation.cases(DTYPES, DTYPES, DTYPES):  # parameters, state, output
        parity(implementation, sample(5003, dtypes=dtypes))


@each_implementation
def test_magnitudes(implementation):
    for scale in (0.0, 1e-40, 3e38, float("inf"), float("nan")):
        parity(implementation, sample(1000, scale=scale))


def test_large_outputs_use_non_temporal_stores():
    # Above the size for non-temporal stores; shifted, the target is not aligned.
    param, buffer, lr, horizon, _ = sample(2**22 + 13)
    for dtype, shift in zip(DTYPES, (1, 0, 1), strict=True):
        out = torch.zeros(param.numel() + shift, dtype=dtype)[shift:]
        parity(COMPILED_CPU, (param, buffer, lr, horizon, out))


@fuzz
@given(st.integers(0, 70_000), st.tuples(*[st.sampled_from(DTYPES)] * 3), st.floats(0, 100))
def test_compiled_cpu_on_anything(numel, dtypes, horizon):
    parity(COMPILED_CPU, sample(numel, dtypes=dtypes, horizon=horizon))


def test_is_exact_for_a_constant_velocity():
    param = torch.nn.Parameter(torch.randn(1000, dtype=torch.float32))
    optimizer = torch.optim.SGD([param], lr=0.125, momentum=0.5)
    param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    buffer = optimizer.state[param]["momentum_buffer"]
    param.grad.fill_(0.25)  # buffer <- 0.5 * 0.5 + 0.25: it does not change
    predicted = predict_sgd(param.detach(), buffer.clone(), lr=0.125, horizon=4)
    for _ in range(4):
        optimizer.step()
    torch.testing.assert_close(predicted, param.detach(), rtol=1e-6, atol=1e-6)


def test_numbers_and_tensors_give_the_same_and_horizon_zero_gives_the_parameters():
    param, buffer, lr, horizon, out = sample(1000)
    expected = predict_sgd(param, buffer, lr=0.1, horizon=3)
    assert predict_sgd(param, buffer, lr=lr, horizon=horizon, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(predict_sgd(param, buffer, lr=lr, horizon=0), param)
    in_place = param.clone()
    predict_sgd(in_place, buffer, lr=lr, horizon=3, out=in_place)
    assert torch.equal(in_place, expected)


def test_bad_arguments_are_refused():
    def good():
        return dict(zip(NAMES, sample(100), strict=True))

    rows = [
        ({"param": torch.zeros(100).double()}, "param must be .* got float64 of shape"),
        ({"param": torch.zeros(200)[::2]}, "param must be .* not contiguous"),
        ({"momentum_buffer": torch.zeros(99)}, "momentum_buffer must be .* param's length"),
        ({"out": torch.zeros(100, dtype=torch.int32)}, "out must be .* bfloat16 or float16"),
        ({"lr": torch.ones(1).double()}, r"lr must be a number, or a 0-d .* shape \[1\]"),
    ]
    assert_refused(predict_sgd, good, rows, dict.values)
    assert_refused(predict_sgd, good, [({"horizon": -1}, "horizon must be at least 0, got -1")])
