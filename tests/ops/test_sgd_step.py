"""``sgd_step_``: samples for the parity harness, and tests of this op alone."""

from itertools import islice, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel.ops import clear_nonfinite_, predict_sgd, sgd_step_
from pyparallel.ops.sgd_step import clear_nonfinite_reference, sgd_step_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    EMULATED_CUDA,
    IMPLEMENTATIONS,
    assert_parity,
    assert_refused,
    double,
    each_implementation,
    fuzz,
)
from tests.ops.steps import FLOAT, SPANS, StepTests, in_spans, normals, surroundings

BUFFERS = ("param", "grad", "momentum_buffer")
PLAIN = {"momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1}
NESTEROV = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}


def buffers(numel, *, dtypes=(FLOAT,) * 3, scale=1.0):
    values = islice(normals(numel, scale), 3)
    return {
        name: tensor.to(dtype) for name, tensor, dtype in zip(BUFFERS, values, dtypes, strict=True)
    }


def sample(
    numel,
    *,
    dtypes=(FLOAT,) * 3,
    scale=1.0,
    spans=None,
    nesterov=False,
    maximize=False,
    **around,
):
    """All arguments of the op, by name and in its order."""
    own = buffers(numel, dtypes=dtypes, scale=scale)
    own = {"param": own["param"], **in_spans(own.pop("grad"), spans)} | own
    numbers = {"lr": double(1e-2), "momentum": 0.9, "dampening": 0.0 if nesterov else 0.25}
    numbers |= {"weight_decay": 0.1, "nesterov": nesterov, "maximize": maximize}
    return own | numbers | surroundings(numel, scale=scale, **around)


def without_momentum(numel, **around):
    return sample(numel, **around) | {"momentum_buffer": None, "momentum": 0.0, "dampening": 0.0}


def parity(implementation, arguments, **tolerance):
    values = tuple(arguments.values())
    assert_parity(implementation, "sgd_step_", sgd_step_reference, values, **tolerance)


class TestSgdStep(StepTests):
    op, reference = staticmethod(sgd_step_), staticmethod(sgd_step_reference)
    buffers, sample = staticmethod(buffers), staticmethod(sample)
    options = PLAIN | {"lr": 1e-2}
    more_options = (NESTEROV | {"lr": 1e-2},)

    def predict(self, own, options, **out):
        states = own["param"], own["momentum_buffer"]
        return predict_sgd(*states, lr=options["lr"], horizon=3, **out)


@each_implementation
def test_lengths_without_momentum(implementation):
    for numel in implementation.lengths:
        parity(implementation, without_momentum(numel))


@each_implementation
def test_inputs_and_outputs_without_momentum(implementation):
    for message, out, count in implementation.cases(DTYPES, [*DTYPES, None], [0, 3]):
        around = {"num_messages": count, "message_dtype": message, "out_dtypes": (message, out)}
        parity(implementation, without_momentum(1003, **around))


@each_implementation
def test_gradients_and_mixing_without_momentum(implementation):
    # Of more messages than one launch takes, those after the step are mixed apart.
    spans, infinite = ((3, 20), (20, 511), (600, 1003)), (None, 1.0)
    counts = 0, 1, implementation.num_messages
    for found_inf, after, count in implementation.cases(infinite, (False, True), counts):
        around = {"spans": spans, "found_inf": found_inf, "mix_after": after, "counts": True}
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if count > 1 else {}
        parity(implementation, without_momentum(1003, num_messages=count, **around), **tolerance)


@each_implementation
def test_options(implementation):
    for nesterov, maximize in product((False, True), repeat=2):
        parity(implementation, sample(1003, nesterov=nesterov, maximize=maximize))


@each_implementation
def test_magnitudes(implementation):
    for scale, nesterov in product((0.0, 1e-40, 3e38, float("inf"), float("nan")), (False, True)):
        parity(implementation, sample(1003, scale=scale, nesterov=nesterov))


@fuzz
@given(
    st.integers(0, 70_000),
    st.tuples(*[st.sampled_from(DTYPES)] * 3),
    st.sampled_from(DTYPES),
    st.integers(0, 4),
    st.booleans(),
    SPANS,
)
def test_compiled_cpu_on_anything(numel, dtypes, message_dtype, num_messages, nesterov, spans):
    around = {"num_messages": num_messages, "message_dtype": message_dtype, "mix_after": nesterov}
    options = {"nesterov": nesterov, "spans": spans(numel)}
    parity(COMPILED_CPU, sample(numel, dtypes=dtypes, **options, **around))


@pytest.mark.parametrize("options", [PLAIN, NESTEROV, {}], ids=["plain", "nesterov", "none"])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_many_steps_agree_with_torch(options, maximize, as_tensor):
    own = buffers(1000)
    own["momentum_buffer"].zero_()
    theirs = torch.nn.Parameter(own["param"].clone())
    optimizer = torch.optim.SGD([theirs], lr=1e-2, maximize=maximize, fused=True, **options)
    gradients = normals(1000)
    lr = torch.tensor(1e-2, dtype=torch.float64) if as_tensor else 1e-2
    for number in range(1, 21):
        own["grad"] = next(gradients)
        theirs.grad = own["grad"].clone()
        optimizer.step()
        # The first step of torch ignores dampening.
        first = {"dampening": 0.0} if number == 1 else {}
        sgd_step_(**own, lr=lr, maximize=maximize, **(options | first))
    torch.testing.assert_close(own["param"], theirs.detach(), rtol=1e-6, atol=1e-6)
    if options:
        velocity = optimizer.state[theirs]["momentum_buffer"]
        torch.testing.assert_close(own["momentum_buffer"], velocity, rtol=1e-5, atol=1e-5)


def test_without_momentum_the_buffer_becomes_the_gradient():
    for dampening in (0.0, 0.5):
        own = buffers(1000)
        bare = own | {"param": own["param"].clone(), "momentum_buffer": None}
        sgd_step_(**own, lr=0.1, dampening=dampening)
        sgd_step_(**bare, lr=0.1, dampening=dampening)
        assert torch.equal(own["momentum_buffer"], own["grad"]), f"dampening {dampening}"
        assert torch.equal(own["param"], bare["param"]), f"dampening {dampening}"


@pytest.mark.parametrize("options", [PLAIN, NESTEROV], ids=["plain", "nesterov"])
def test_steps_on_the_numerator(options):
    own, mass = buffers(10_000), 0.3
    z, grad, velocity = (tensor.double() for tensor in own.values())
    sgd_step_(**own, lr=1e-2, **options, mass=double(mass))
    x = mass * z
    grad = grad + 0.1 * x
    velocity = 0.9 * velocity + (1 - options.get("dampening", 0.0)) * grad
    x -= 1e-2 * (grad + 0.9 * velocity if "nesterov" in options else velocity)
    torch.testing.assert_close(own["param"].double(), x / mass, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own["momentum_buffer"].double(), velocity, rtol=1e-6, atol=1e-6)


def test_states_and_numbers_that_do_not_fit_are_refused():
    buffer = torch.zeros(200)
    rows = [
        ({"momentum_buffer": torch.zeros(99)}, "momentum_buffer must be .* param's length"),
        ({"momentum_buffer": None}, "momentum_buffer must be given where momentum is not 0, got N"),
        (
            {"momentum_buffer": buffer[:100], "prediction": buffer[50:150]},
            "prediction must not overlap momentum_buffer, got 200 bytes in common",
        ),
    ]
    assert_refused(sgd_step_, lambda: sample(100), rows, dict.values)
    rows = [
        ({"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
        ({"nesterov": True, "momentum": 0.0}, "momentum must be over 0 with nesterov, got 0.0"),
        ({"nesterov": True}, "dampening must be 0 with nesterov, got 0.25"),
    ]
    assert_refused(sgd_step_, lambda: sample(100), rows)


def sample_nonfinite(numel):
    """Return arguments of ``clear_nonfinite_``: of each dtype, empty, of two dimensions."""
    values = torch.linspace(-3, 3, numel)
    values[2::7], values[5::11], values[3::13] = torch.inf, -torch.inf, torch.nan
    tensors = [values.to(dtype) for dtype in (*DTYPES, torch.float64)]
    tensors += [torch.zeros(0), values.repeat(3, 1), values.repeat(3, 1).T.clone().T]
    return tensors, values.isfinite().all().logical_not()


# There is no kernel of it in C++: Triton's serves, or torch's ops.
@pytest.mark.parametrize(
    "implementation", [each for each in IMPLEMENTATIONS if each is not EMULATED_CUDA], ids=str
)
def test_what_is_not_finite_is_cleared(implementation):
    for numel in (0, 5, 1025):
        arguments = sample_nonfinite(numel)
        assert_parity(implementation, "clear_nonfinite_", clear_nonfinite_reference, arguments)


def test_bad_arguments_of_clearing_are_refused():
    def good():
        return {"tensors": [torch.zeros(2, 3)], "found": torch.tensor(False)}

    rule = r"found must be a 0-d bool tensor on the device of tensors\[0\], got"
    rows = [({"found": torch.tensor(1)}, rule), ({"tensors": [torch.ones(2, device="meta")]}, rule)]
    assert_refused(clear_nonfinite_, good, rows)
