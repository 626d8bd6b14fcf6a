"""``adamw_step_``: samples for the parity harness, and tests of this op alone."""

from itertools import islice, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import adamw_step_, predict_adam
from pyparallel.ops.adamw_step import adamw_step_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    assert_parity,
    assert_refused,
    double,
    each_implementation,
    fuzz,
)
from tests.ops.steps import FLOAT, SPANS, StepTests, in_spans, normals, surroundings

BUFFERS = ("param", "grad", "exp_avg", "exp_avg_sq")
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def buffers(numel, *, dtypes=(FLOAT,) * 3, scale=1.0):
    param, grad, mean, root = islice(normals(numel, scale), 4)
    states = mean.to(dtypes[2]), root.square().to(dtypes[2])
    return dict(zip(BUFFERS, (param.to(dtypes[0]), grad.to(dtypes[1]), *states), strict=True))


def sample(
    numel,
    *,
    dtypes=(FLOAT,) * 3,
    scale=1.0,
    spans=None,
    step=7.0,
    beta1=0.9,
    decoupled=True,
    maximize=False,
    **around,
):
    """All arguments of the op, by name and in its order."""
    own = buffers(numel, dtypes=dtypes, scale=scale)
    param, grad = own.pop("param"), own.pop("grad")
    numbers = {"lr": double(1e-2), "beta1": beta1, "beta2": 0.999, "eps": 1e-8}
    numbers |= {"weight_decay": 0.1, "step": double(step)}
    numbers |= {"decoupled": decoupled, "maximize": maximize}
    own = {"param": param, **in_spans(grad, spans), **own}
    return own | numbers | surroundings(numel, scale=scale, **around)


def parity(implementation, arguments, **tolerance):
    values = tuple(arguments.values())
    assert_parity(implementation, "adamw_step_", adamw_step_reference, values, **tolerance)


class TestAdamwStep(StepTests):
    op, reference = staticmethod(adamw_step_), staticmethod(adamw_step_reference)
    buffers, sample = staticmethod(buffers), staticmethod(sample)
    options = ADAM | {"weight_decay": 0.1, "step": 7}

    def predict(self, own, options, **out):
        states = own["param"], own["exp_avg"], own["exp_avg_sq"]
        numbers = {name: value for name, value in options.items() if name != "weight_decay"}
        return predict_adam(*states, **numbers, horizon=3, **out)


@each_implementation
def test_options(implementation):
    rows = implementation.cases((0.0, 0.3, 0.5, 0.95), (False, True), (False, True), (1.0, 7.0))
    for beta1, decoupled, maximize, step in rows:
        options = {"beta1": beta1, "decoupled": decoupled, "maximize": maximize, "step": step}
        parity(implementation, sample(1003, **options))
        parity(implementation, sample(1003, **options, found_inf=1.0))


@each_implementation
def test_magnitudes_and_steps(implementation):
    for scale, step in product((0.0, 1e-25, 1e15, float("inf"), float("nan")), (1.0, 100_000.0)):
        parity(implementation, sample(1003, scale=scale, step=step))


@fuzz
@given(
    st.integers(0, 70_000),
    st.tuples(*[st.sampled_from(DTYPES)] * 3),
    st.sampled_from(DTYPES),
    st.integers(0, 4),
    st.integers(1, 10**6),
    SPANS,
    st.booleans(),
)
def test_compiled_cpu_on_anything(numel, dtypes, message_dtype, num_messages, step, spans, after):
    around = {"num_messages": num_messages, "message_dtype": message_dtype, "mix_after": after}
    options = {"step": float(step), "spans": spans(numel), "decoupled": after}
    parity(COMPILED_CPU, sample(numel, dtypes=dtypes, **options, **around))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("optimizer_type", [torch.optim.Adam, torch.optim.AdamW])
def test_many_steps_agree_with_torch(weight_decay, maximize, as_tensors, optimizer_type):
    own = buffers(1000)
    own["exp_avg"].zero_()
    own["exp_avg_sq"].zero_()
    theirs = torch.nn.Parameter(own["param"].clone())
    options = {"weight_decay": weight_decay, "maximize": maximize}
    optimizer = optimizer_type([theirs], lr=1e-2, **options, fused=True)
    options["decoupled"] = optimizer_type is torch.optim.AdamW
    gradients = normals(1000)
    numbers = ADAM | {"lr": torch.tensor(1e-2, dtype=torch.float64)} if as_tensors else ADAM
    for number in range(1, 21):
        own["grad"] = next(gradients)
        theirs.grad = own["grad"].clone()
        optimizer.step()
        step = optimizer.state[theirs]["step"] if as_tensors else number
        adamw_step_(**own, **numbers, **options, step=step)
    state = optimizer.state[theirs]
    torch.testing.assert_close(own["param"], theirs.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own["exp_avg"], state["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-6, atol=0.0)


def test_steps_on_the_numerator():
    own, mass = buffers(10_000), 0.3
    z, grad, mean, square = (tensor.double() for tensor in own.values())
    adamw_step_(**own, **ADAM, weight_decay=0.1, step=7, mass=double(mass))
    x = mass * z * (1 - 1e-2 * 0.1)
    mean = 0.9 * mean + 0.1 * grad
    square = 0.999 * square + 0.001 * grad * grad
    m_hat, v_hat = mean / (1 - 0.9**7), square / (1 - 0.999**7)
    x -= 1e-2 * m_hat / (v_hat.sqrt() + 1e-8)
    torch.testing.assert_close(own["param"].double(), x / mass, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own["exp_avg"].double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own["exp_avg_sq"].double(), square, rtol=1e-6, atol=0.0)


def test_without_decay_a_first_average_is_the_gradient_exactly():
    own = buffers(1000)
    own["exp_avg"].mul_(1e8)
    adamw_step_(**own, **ADAM | {"beta1": 0.0}, weight_decay=0.0, step=2)
    assert torch.equal(own["exp_avg"], own["grad"])


def test_states_and_numbers_that_do_not_fit_are_refused():
    buffer = torch.zeros(200)
    rows = [
        ({"grad": [torch.zeros(100).double()]}, r"grad\[0\] must be .* float16 .* got float64"),
        ({"exp_avg": torch.zeros(99)}, "exp_avg must be .* param's length"),
        ({"exp_avg_sq": torch.zeros(200)[::2]}, "exp_avg_sq must be .* not contiguous"),
        ({"exp_avg_sq": torch.zeros(100).half()}, "exp_avg and exp_avg_sq must have one dt"),
        (
            {"exp_avg": buffer[:100], "prediction": buffer[50:150]},
            "prediction must not overlap exp_avg, got 200 bytes in common",
        ),
        ({"step": torch.ones(2).double()}, r"step must be a number, or a 0-d .* shape \[2\]"),
    ]
    assert_refused(adamw_step_, lambda: sample(100), rows, dict.values)
    rows = [
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\), got 1.0"),
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\), got -0.1"),
        ({"eps": -1e-8}, "eps must be at least 0, got -1e-08"),
        ({"step": 0}, "step must be at least 1, got 0"),
    ]
    assert_refused(adamw_step_, lambda: sample(100), rows)
