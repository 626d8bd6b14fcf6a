"""``add_or_clear_``: samples for the parity harness, and tests of this op alone."""

import torch

from pyparallel.ops import add_or_clear_
from pyparallel.ops.add_or_clear import add_or_clear_reference
from tests.ops.parity import (
    DTYPES,
    assert_parity,
    assert_refused,
    each_compiled,
)

FLAGS = [None, torch.tensor(False), torch.tensor(True)]


def sample(numel, *, dtypes=(torch.float32, torch.float32), times=3.0, clear=None):
    """Return arguments of the op: sums that are finite, that overflow, inf and nan."""
    generator = torch.Generator().manual_seed(numel)
    x, y = (torch.randn(numel, generator=generator) for _ in range(2))
    x[3::7], y[3::7] = 3e38, 1e38
    x[5::11], y[8::11], x[2::13] = torch.inf, torch.nan, 6e4
    return x.to(dtypes[0]), y.to(dtypes[1]), times, clear


@each_compiled
def test_lengths(implementation):
    for numel in implementation.lengths:
        assert_parity(implementation, "add_or_clear_", add_or_clear_reference, sample(numel))


@each_compiled
def test_dtypes_and_flags(implementation):
    for *dtypes, clear, has_y in implementation.cases(DTYPES, DTYPES, FLAGS, [False, True]):
        x, y, *others = sample(5003, dtypes=dtypes, clear=clear)
        arguments = x, y if has_y else None, *others
        assert_parity(implementation, "add_or_clear_", add_or_clear_reference, arguments)


def test_what_would_overflow_stays_and_a_flag_clears():
    x, y = torch.tensor([1.0, 3e38, -3e38, 2.0]), torch.tensor([0.5, 1e38, -3e38, torch.nan])
    assert add_or_clear_(x, y, times=4, clear=FLAGS[1]) is x
    assert x.tolist() == [3.0, *torch.tensor([3e38, -3e38]).tolist(), 2.0]
    x[1] = torch.nan
    assert not add_or_clear_(x, clear=FLAGS[2]).any()


def test_bad_arguments_are_refused():
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
