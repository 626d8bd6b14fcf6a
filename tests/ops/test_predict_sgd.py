"""``predict_sgd``: samples for the parity harness, and tests of this op alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.ops import predict_sgd
from pyparallel.ops.predict_sgd import predict_sgd_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    IMPLEMENTATIONS,
    LENGTHS,
    assert_parity,
    assert_refused,
    double,
)


def sample(numel, *, dtypes=(torch.float32,) * 3, scale=1.0, horizon=3.0):
    generator = torch.Generator().manual_seed(numel)
    param, buffer = (scale * torch.randn(numel, generator=generator) for _ in range(2))
    out = torch.full((numel,), float("nan"), dtype=dtypes[2])
    return param.to(dtypes[0]), buffer.to(dtypes[1]), double(0.1), double(horizon), out


def parity(implementation, arguments):
    assert_parity(implementation, "predict_sgd", predict_sgd_reference, arguments)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_lengths(implementation, numel):
    parity(implementation, sample(numel))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_dtypes(implementation, dtype, state_dtype, out_dtype):
    parity(implementation, sample(5003, dtypes=(dtype, state_dtype, out_dtype)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-40, 3e38, float("inf"), float("nan")])
def test_magnitudes(implementation, scale):
    parity(implementation, sample(1000, scale=scale))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_large_outputs_use_non_temporal_stores(out_dtype, shift):
    # Above the size for non-temporal stores; shifted, the target is not aligned.
    param, buffer, lr, horizon, _ = sample(2**22 + 13)
    out = torch.zeros(param.numel() + shift, dtype=out_dtype)[shift:]
    parity(COMPILED_CPU, (param, buffer, lr, horizon, out))


@settings(deadline=None)
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


def test_opcheck():
    torch.library.opcheck(torch.ops.pyparallel.predict_sgd.default, sample(100))


NAMES = ("param", "momentum_buffer", "lr", "horizon", "out")


def replaced(**changes):
    return {**dict(zip(NAMES, sample(100), strict=True)), **changes}


@pytest.mark.parametrize(
    ("arguments", "error_text"),
    [
        (replaced(param=torch.zeros(100).double()), "param must be .* got float64 of shape"),
        (replaced(param=torch.zeros(200)[::2]), "param must be .* not contiguous"),
        (replaced(momentum_buffer=torch.zeros(99)), "momentum_buffer must be .* param's length"),
        (replaced(out=torch.zeros(100, dtype=torch.int32)), "out must be .* bfloat16 or float16"),
        (replaced(lr=torch.ones(1).double()), r"lr must be a number, or a 0-d .* shape \[1\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_tensors_are_refused(arguments, error_text):
    assert_refused(predict_sgd, arguments, error_text)


def test_a_negative_horizon_is_refused():
    with pytest.raises(ValueError, match="horizon must be at least 0, got -1"):
        predict_sgd(torch.zeros(3), torch.zeros(3), lr=0.1, horizon=-1)
