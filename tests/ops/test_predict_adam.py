"""``predict_adam``: samples for the parity harness, and tests of this op alone."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import predict_adam
from pyparallel.ops.predict_adam import predict_adam_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    assert_parity,
    assert_refused,
    double,
    each_implementation,
    fuzz,
)

NAMES = ("param", "exp_avg", "exp_avg_sq", "lr", "beta1", "beta2", "eps", "step", "horizon", "out")


def sample(numel, *, dtypes=(torch.float32,) * 3, scale=1.0, step=7.0, horizon=3.0):
    generator = torch.Generator().manual_seed(numel)
    param, mean, root = (scale * torch.randn(numel, generator=generator) for _ in range(3))
    states = mean.to(dtypes[1]), root.square().to(dtypes[1])
    out = torch.full((numel,), float("nan"), dtype=dtypes[2])
    numbers = double(1e-3), 0.9, 0.999, 1e-8, double(step), double(horizon)
    return param.to(dtypes[0]), *states, *numbers, out


def parity(implementation, arguments):
    assert_parity(implementation, "predict_adam", predict_adam_reference, arguments)


@each_implementation
def test_lengths(implementation):
    for numel in implementation.lengths:
        parity(implementation, sample(numel))


@each_implementation
def test_dtypes(implementation):
    for dtypes in implementation.cases(DTYPES, DTYPES, DTYPES):  # parameters, state, output
        parity(implementation, sample(5003, dtypes=dtypes))


@each_implementation
def test_magnitudes_and_steps(implementation):
    for scale, step in product((0.0, 1e-25, 1e15, float("inf"), float("nan")), (1.0, 100_000.0)):
        parity(implementation, sample(1000, scale=scale, step=step))


@fuzz
@given(st.integers(0, 70_000), st.tuples(*[st.sampled_from(DTYPES)] * 3), st.integers(1, 10**6))
def test_compiled_cpu_on_anything(numel, dtypes, step):
    parity(COMPILED_CPU, sample(numel, dtypes=dtypes, step=float(step)))


def test_is_exact_for_constant_gradients():
    # Then m_hat = g and v_hat = g * g in every step, and all updates of Adam are equal.
    param = torch.nn.Parameter(torch.randn(1000, dtype=torch.float32))
    gradient = torch.randn(1000)
    optimizer = torch.optim.Adam([param], lr=1e-2)
    param.grad = gradient
    for _ in range(3):
        optimizer.step()
    state = optimizer.state[param]
    moments = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    arguments = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "step": state["step"]}
    predicted = predict_adam(param.detach(), *moments, **arguments, horizon=5)
    for _ in range(5):
        optimizer.step()
    torch.testing.assert_close(predicted, param.detach(), rtol=1e-5, atol=1e-5)


def test_agrees_with_float64():
    param, mean, square, *_ = sample(10_000)
    predicted = predict_adam(
        param, mean, square, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, step=12, horizon=2.5
    )
    m_hat = mean.double() / (1 - 0.9**12)
    v_hat = square.double() / (1 - 0.99**12)
    expected = param.double() - 1e-2 * 2.5 * m_hat / (v_hat.sqrt() + 1e-6)
    torch.testing.assert_close(predicted.double(), expected, rtol=1e-5, atol=1e-6)


def test_horizon_zero_gives_the_parameters():
    param, mean, square, *_ = sample(1000)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 1}
    assert torch.equal(predict_adam(param, mean, square, **numbers, horizon=0), param)


def test_bad_arguments_are_refused():
    def good():
        return dict(zip(NAMES, sample(100), strict=True))

    rows = [
        ({"param": torch.zeros(10, 10)}, r"param must be a contiguous 1-d .* \[10, 10\]"),
        ({"exp_avg": torch.zeros(99)}, "exp_avg must be .* param's length"),
        ({"exp_avg_sq": torch.zeros(99)}, "exp_avg_sq must be .* param's length"),
        ({"exp_avg_sq": torch.zeros(100).half()}, "exp_avg and exp_avg_sq must have one dtype"),
        ({"out": torch.zeros(99)}, "out must be .* param's length"),
        ({"step": torch.ones(2).double()}, r"step must be a number, or a 0-d .* shape \[2\]"),
    ]
    assert_refused(predict_adam, good, rows, dict.values)
    numbers = [
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\), got 1.0"),
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\), got -0.1"),
        ({"eps": -1e-8}, "eps must be at least 0, got -1e-08"),
        ({"step": 0}, "step must be at least 1, got 0"),
        ({"horizon": -1}, "horizon must be at least 0, got -1"),
    ]
    assert_refused(predict_adam, good, numbers)
