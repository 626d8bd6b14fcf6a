"""``mix_``, ``screen_headers``, ``add_or_clear_``: samples for the parity harness, and tests."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from pyparallel.ops import add_or_clear_, mix_, screen_headers
from pyparallel.ops.mix import (
    FORWARDS_UNIT,
    NONFINITE_UNIT,
    add_or_clear_reference,
    mix_reference,
    screen_headers_reference,
)
from tests.ops.parity import (
    COMPILED_CPU,
    DTYPES,
    assert_parity,
    assert_refused,
    each_compiled,
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


EXPECTED = [0.0, 3.0, 7.0, 4096.0, 12.0, 0.0, 14.0, 2.0]
HEADER = [0.5, *EXPECTED[1:7], 0.0]


def sample_headers(num_rows):
    """Return arguments of the op: rows of which most differ in a column or two."""
    rows, expected = (torch.tensor([row] * num_rows, dtype=torch.float64).view(-1, 8)
                      for row in (HEADER, EXPECTED))  # fmt: skip
    values = torch.tensor([-1.0, 0, 2, 1e300, torch.nan, torch.inf, -0.0, 14], dtype=torch.float64)
    generator = torch.Generator().manual_seed(num_rows)
    for table in (rows, expected):
        for _ in range(2):
            place = torch.randint(8, (num_rows, 2), generator=generator)
            changed = torch.arange(num_rows) % 5 > 1
            table[changed, place[changed, 0]] = values[place[changed, 1]]
    masses = torch.full((num_rows,), 7.0, dtype=torch.float64)
    return rows, expected, masses, torch.tensor(5)


@each_compiled
def test_headers(implementation):
    for num_rows in (0, 1, 2, 31, 33, 1000):
        arguments = sample_headers(num_rows)
        assert_parity(implementation, "screen_headers", screen_headers_reference, arguments)


@pytest.mark.parametrize(
    ("changes", "mass", "counted"),
    [
        ({}, 0.5, 0),
        ({0: 2.0}, 2.0, 0),
        *(({column: 99.0}, 0.0, 1) for column in range(1, 6)),
        *(({column: -1.0}, 0.5, 0) for column in range(1, 7)),
        *(({0: mass}, 0.0, 1) for mass in (0.0, 2.5, torch.nan)),
        ({6: 99.0}, 0.5, FORWARDS_UNIT),
        ({7: 3.0}, 0.5, NONFINITE_UNIT),
        ({1: 99.0, 6: 15.0, 7: torch.nan}, 0.0, 1 + NONFINITE_UNIT + FORWARDS_UNIT),
    ],
)
def test_which_headers_fit(changes, mass, counted):
    rows, expected = (torch.tensor([row, row], dtype=torch.float64) for row in (HEADER, EXPECTED))
    for column, value in changes.items():
        rows[1, column] = value
    counter = torch.tensor(10)
    assert screen_headers(rows, expected, counter=counter).tolist() == [0.5, mass]
    assert int(counter) == 10 + counted


def test_bad_arguments_of_headers_are_refused():
    def good():
        rows, expected, _, counter = sample_headers(3)
        return {"rows": rows, "expected": expected, "counter": counter}

    def direct(arguments):
        rows, expected, counter = arguments.values()
        return rows, expected, torch.zeros(3, dtype=torch.float64), counter

    doubles = {"dtype": torch.float64}
    rows = [
        ({"rows": torch.zeros(8, **doubles)}, r"rows must be \(k, 8\) float64, got .* \[8\]"),
        ({"rows": torch.zeros(3, 7, **doubles)}, r"rows must be a contiguous float64 .* \[3, 8\]"),
        ({"rows": torch.zeros(3, 8)}, "rows must be a contiguous float64"),
        ({"expected": torch.zeros(2, 8, **doubles)}, r"expected must be .* \[3, 8\] on cpu"),
        ({"counter": torch.zeros(1).long()}, "counter must be a 0-d int64 tensor on rows's device"),
    ]
    assert_refused(screen_headers, good, rows, direct)


FLAGS = [None, torch.tensor(False), torch.tensor(True)]


def sample_sum(numel, *, dtypes=(torch.float32, torch.float32), times=3.0, clear=None):
    """Return arguments of the op: sums that are finite, that overflow, inf and nan."""
    generator = torch.Generator().manual_seed(numel)
    x, y = (torch.randn(numel, generator=generator) for _ in range(2))
    x[3::7], y[3::7] = 3e38, 1e38
    x[5::11], y[8::11], x[2::13] = torch.inf, torch.nan, 6e4
    return x.to(dtypes[0]), y.to(dtypes[1]), times, clear


@each_compiled
def test_lengths_of_sums(implementation):
    for numel in implementation.lengths:
        assert_parity(implementation, "add_or_clear_", add_or_clear_reference, sample_sum(numel))


@each_compiled
def test_dtypes_and_flags_of_sums(implementation):
    for *dtypes, clear, has_y in implementation.cases(DTYPES, DTYPES, FLAGS, [False, True]):
        x, y, *others = sample_sum(5003, dtypes=dtypes, clear=clear)
        arguments = x, y if has_y else None, *others
        assert_parity(implementation, "add_or_clear_", add_or_clear_reference, arguments)


def test_what_would_overflow_stays_and_a_flag_clears():
    x, y = torch.tensor([1.0, 3e38, -3e38, 2.0]), torch.tensor([0.5, 1e38, -3e38, torch.nan])
    assert add_or_clear_(x, y, times=4, clear=FLAGS[1]) is x
    assert x.tolist() == [3.0, *torch.tensor([3e38, -3e38]).tolist(), 2.0]
    x[1] = torch.nan
    assert not add_or_clear_(x, clear=FLAGS[2]).any()


def test_bad_arguments_of_sums_are_refused():
    def good():
        return {"x": torch.zeros(10), "y": torch.ones(10), "times": 1.0, "clear": FLAGS[1]}

    shared = torch.zeros(11)
    rows = [
        ({"x": torch.zeros(2, 5)}, r"x must be a contiguous 1-d .* \[2, 5\]"),
        ({"y": torch.zeros(9)}, "y must be .* x's length"),
        ({"clear": torch.zeros(1).bool()}, "clear must be a 0-d bool tensor on x's device"),
        ({"clear": torch.tensor(1)}, "clear must be a 0-d bool .* got int64"),
        ({"x": shared[1:], "y": shared[:10]}, "x must not overlap y, got 36 bytes"),
    ]
    assert_refused(add_or_clear_, good, rows[:-1], dict.values)
    assert_refused(add_or_clear_, good, rows[-1:])
