"""``mix_``: samples for the parity harness, and tests of this op alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.ops import mix_
from pyparallel.ops.mix import mix_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    IMPLEMENTATIONS,
    LENGTHS,
    assert_parity,
    assert_refused,
)


def sample(numel, num_messages, *, dtype=torch.float32, message_dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(numel + num_messages)
    z, *messages = (
        (scale * torch.randn(numel, generator=generator)).to(kind)
        for kind in [dtype] + [message_dtype] * num_messages
    )
    masses = torch.rand(num_messages, generator=generator, dtype=torch.float64)
    return z, torch.tensor(0.5, dtype=torch.float64), messages, masses


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("num_messages", [0, 1, 2, 3, 7])
def test_lengths_and_counts(implementation, numel, num_messages):
    assert_parity(implementation, "mix_", mix_reference, sample(numel, num_messages))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("message_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e4], ids="scale{:g}".format)
def test_dtypes_and_magnitudes(implementation, dtype, message_dtype, scale):
    arguments = sample(5003, 2, dtype=dtype, message_dtype=message_dtype, scale=scale)
    assert_parity(implementation, "mix_", mix_reference, arguments)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_inf_and_nan_are_those_of_the_reference(implementation):
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38])
    messages = [special.roll(shift) for shift in range(len(special))]
    arguments = (special, torch.tensor(1.0, dtype=torch.float64), messages)
    assert_parity(implementation, "mix_", mix_reference, (*arguments, torch.ones(7).double()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_many_messages_go_in_groups(implementation):
    # More than one launch on GPUs: grouping changes the last bits.
    arguments = sample(1025, 200)
    assert_parity(implementation, "mix_", mix_reference, arguments, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(
    numel=st.integers(0, 70_000),
    num_messages=st.integers(0, 6),
    dtype=st.sampled_from(DTYPES),
    message_dtype=st.sampled_from(DTYPES),
)
def test_compiled_cpu_on_anything(numel, num_messages, dtype, message_dtype):
    arguments = sample(numel, num_messages, dtype=dtype, message_dtype=message_dtype)
    assert_parity(COMPILED_CPU, "mix_", mix_reference, arguments)


@pytest.mark.parametrize("num_messages", [1, 2, 5])
def test_is_the_weighted_mean(num_messages):
    z, weight, messages, masses = sample(4097, num_messages)
    total = weight + masses.sum()
    parts = zip(messages, masses, strict=True)
    expected = (weight * z.double() + sum(mass * part.double() for part, mass in parts)) / total
    mix_(z, weight, messages, masses)
    torch.testing.assert_close(z.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weight, total, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_messages_change_nothing(dtype):
    z = torch.randn(1000).to(dtype)
    before, weight = z.clone(), torch.tensor(1 / 3, dtype=torch.float64)
    for _ in range(100):
        mix_(z, weight, [z.clone(), z.clone()], torch.full((2,), 1 / 3, dtype=torch.float64))
    assert torch.equal(z, before)


@pytest.mark.parametrize("num_messages", [0, 3])
def test_opcheck(num_messages):
    torch.library.opcheck(torch.ops.pyparallel.mix_.default, sample(100, num_messages))


def test_compiles_into_a_graph_without_breaks():
    arguments = sample(1000, 2)
    expected = [argument.clone() for argument in arguments[:2]]
    mix_reference(*expected, *arguments[2:])
    torch.compile(mix_, fullgraph=True, backend="aot_eager")(*arguments)
    torch.testing.assert_close(list(arguments[:2]), expected, rtol=0.0, atol=0.0)


def _replace(index, value):
    arguments = list(sample(100, 2))
    arguments[index] = value
    return tuple(arguments)


@pytest.mark.parametrize(
    ("arguments", "error_text"),
    [
        (_replace(0, torch.zeros(100).double()), "z must be .* got float64 of shape .100. on cpu"),
        (_replace(0, torch.zeros(10, 10)), r"z must be a contiguous 1-d .* shape \[10, 10\]"),
        (_replace(0, torch.zeros(200)[::2]), "z must be .* not contiguous"),
        (_replace(1, torch.tensor(1.0)), r"weight must be a contiguous float64 .* shape \[\]"),
        (_replace(2, [torch.zeros(100)]), r"masses must be .* of shape \[1\] .* shape \[2\]"),
        (_replace(2, [torch.zeros(99)] * 2), r"messages\[0\] must be .* z's length .* \[99\]"),
        (_replace(2, [torch.zeros(100), torch.zeros(100).half()]), "messages must have one dtype"),
        (_replace(3, torch.ones(2)), "masses must be a contiguous float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(arguments, error_text):
    assert_refused(mix_, arguments, error_text)


def test_a_message_on_another_device_is_refused():
    arguments = _replace(2, [torch.zeros(100, device="meta")] * 2)
    with pytest.raises(ValueError, match=r"messages\[0\] must be .* device .* on meta"):
        mix_(*arguments)


@pytest.mark.parametrize("mass", [0.0, -0.5, float("nan"), float("inf")])
def test_impossible_masses_are_refused(mass):
    z, _, messages, masses = sample(10, 1)
    with pytest.raises(ValueError, match="weight and masses must be at least 0 with a positive"):
        mix_(z, torch.tensor(0.0).double(), messages, torch.full_like(masses, mass))
    assert torch.equal(z, sample(10, 1)[0])
