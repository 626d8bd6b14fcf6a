"""``mix_``: samples for the parity harness, and tests of this op alone."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from pyparallel.ops import mix_
from pyparallel.ops.mix import mix_reference
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    assert_parity,
    assert_refused,
    each_implementation,
    fuzz,
)

NAMES = ("z", "weight", "messages", "masses")


def sample(numel, num_messages, *, dtype=torch.float32, message_dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(numel + num_messages)
    z, *messages = (
        (scale * torch.randn(numel, generator=generator)).to(kind)
        for kind in [dtype] + [message_dtype] * num_messages
    )
    masses = torch.rand(num_messages, generator=generator, dtype=torch.float64)
    return z, torch.tensor(0.5, dtype=torch.float64), messages, masses


@each_implementation
def test_lengths_and_counts(implementation):
    for numel, num_messages in product(implementation.lengths, (0, 1, 2, 3, 7)):
        assert_parity(implementation, "mix_", mix_reference, sample(numel, num_messages))


@each_implementation
def test_dtypes_and_magnitudes(implementation):
    for dtype, message_dtype, scale in implementation.cases(DTYPES, DTYPES, [1.0, 1e-6, 3e4]):
        arguments = sample(5003, 2, dtype=dtype, message_dtype=message_dtype, scale=scale)
        assert_parity(implementation, "mix_", mix_reference, arguments)


@each_implementation
def test_inf_and_nan_are_those_of_the_reference(implementation):
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38])
    messages = [special.roll(shift) for shift in range(len(special))]
    arguments = (special, torch.tensor(1.0, dtype=torch.float64), messages)
    assert_parity(implementation, "mix_", mix_reference, (*arguments, torch.ones(7).double()))


@each_implementation
def test_many_messages_go_in_groups(implementation):
    # More than one launch on GPUs: grouping changes the last bits.
    arguments = sample(1025, implementation.num_messages)
    assert_parity(implementation, "mix_", mix_reference, arguments, rtol=1e-5, atol=1e-5)


@fuzz
@given(
    numel=st.integers(0, 70_000),
    num_messages=st.integers(0, 6),
    dtype=st.sampled_from(DTYPES),
    message_dtype=st.sampled_from(DTYPES),
)
def test_compiled_cpu_on_anything(numel, num_messages, dtype, message_dtype):
    arguments = sample(numel, num_messages, dtype=dtype, message_dtype=message_dtype)
    assert_parity(COMPILED_CPU, "mix_", mix_reference, arguments)


def test_is_the_weighted_mean():
    for num_messages in (1, 2, 5):
        z, weight, messages, masses = sample(4097, num_messages)
        total = weight + masses.sum()
        parts = zip(messages, masses, strict=True)
        expected = (weight * z.double() + sum(mass * part.double() for part, mass in parts)) / total
        mix_(z, weight, messages, masses)
        torch.testing.assert_close(z.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(weight, total, rtol=1e-15, atol=0.0)


@each_implementation
def test_messages_of_mass_zero_change_nothing(implementation):
    """Whatever they hold; and the others are mixed as without them."""
    nan, infinity = float("nan"), float("inf")
    for dtype, message_dtype in implementation.cases(DTYPES, DTYPES):
        for numel in (5, 1003):
            z, weight, messages, masses = sample(numel, 4, dtype=dtype, message_dtype=message_dtype)
            z[0] = -0.0
            messages[0][::3], messages[2][:] = nan, -infinity
            masses[0] = masses[2] = 0
            rest = z.clone(), weight.clone(), messages[1::2], masses[1::2]
            mix_reference(*rest)
            for case in ((z, weight, messages, masses), (z, weight, messages[::2], masses[::2])):
                mine = pytree.tree_map_only(
                    torch.Tensor, lambda tensor: tensor.to(implementation.device, copy=True), case
                )
                with np.errstate(all="ignore"):  # numpy in the interpreter warns of inf and nan
                    implementation.find("mix_")(*mine)
                expected = rest[0] if len(case[2]) == 4 else z
                bits = [tensor.cpu().view(torch.uint8) for tensor in (mine[0], expected)]
                assert torch.equal(*bits), f"{dtype}, {message_dtype}, {numel}, {len(case[2])}"


def test_equal_messages_change_nothing():
    for dtype in DTYPES:
        z = torch.randn(1000).to(dtype)
        before, weight = z.clone(), torch.tensor(1 / 3, dtype=torch.float64)
        for _ in range(100):
            mix_(z, weight, [z.clone(), z.clone()], torch.full((2,), 1 / 3, dtype=torch.float64))
        assert torch.equal(z, before), f"{dtype}"


@pytest.mark.slow  # those of the steps are fast
def test_compiles_into_a_graph_without_breaks():
    arguments = sample(1000, 2)
    expected = [argument.clone() for argument in arguments[:2]]
    mix_reference(*expected, *arguments[2:])
    torch.compile(mix_, fullgraph=True, backend="aot_eager")(*arguments)
    torch.testing.assert_close(list(arguments[:2]), expected, rtol=0.0, atol=0.0)


def test_bad_arguments_are_refused():
    def good():
        return dict(zip(NAMES, sample(100, 2), strict=True))

    part = torch.zeros(100)
    rows = [
        ({"z": part.double()}, r"z must be .* got float64 of shape \[100\] on cpu"),
        ({"z": torch.zeros(10, 10)}, r"z must be a contiguous 1-d .* shape \[10, 10\]"),
        ({"z": torch.zeros(200)[::2]}, "z must be .* not contiguous"),
        ({"weight": torch.tensor(1.0)}, "weight must be a 0-d float64 tensor on z's device"),
        ({"messages": [part]}, r"masses must be .* of shape \[1\] .* shape \[2\]"),
        ({"messages": [part[1:]] * 2}, r"messages\[0\] must be .* z's length .* \[99\]"),
        ({"messages": [part, part.half()]}, "messages must have one dtype"),
        ({"masses": torch.ones(2)}, "masses must be a contiguous float64"),
    ]
    assert_refused(mix_, good, rows, dict.values)
    elsewhere = [torch.zeros(100, device="meta")] * 2
    assert_refused(
        mix_, good, [({"messages": elsewhere}, r"messages\[0\] must be .* device .* on meta")]
    )


def test_impossible_masses_are_refused():
    def good():
        return dict(zip(NAMES, sample(10, 1), strict=True)) | {"weight": torch.zeros(()).double()}

    error_text = "weight and masses must be at least 0 with a positive"
    masses = [torch.tensor([mass]).double() for mass in (0.0, -0.5, float("nan"), float("inf"))]
    assert_refused(mix_, good, [({"masses": mass}, error_text) for mass in masses])
