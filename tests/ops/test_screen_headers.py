"""``screen_headers``: samples for the parity harness, and tests of this op alone."""

import pytest
import torch

from pyparallel.ops import screen_headers
from pyparallel.ops.screen_headers import FORWARDS_UNIT, NONFINITE_UNIT, screen_headers_reference
from tests.ops.parity import assert_parity, assert_refused, each_compiled

EXPECTED = [0.0, 3.0, 7.0, 4096.0, 12.0, 0.0, 14.0, 2.0]
HEADER = [0.5, *EXPECTED[1:7], 0.0]


def sample(num_rows):
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
def test_rows(implementation):
    for num_rows in (0, 1, 2, 31, 33, 1000):
        arguments = sample(num_rows)
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
def test_what_fits(changes, mass, counted):
    rows, expected = (torch.tensor([row, row], dtype=torch.float64) for row in (HEADER, EXPECTED))
    for column, value in changes.items():
        rows[1, column] = value
    counter = torch.tensor(10)
    assert screen_headers(rows, expected, counter=counter).tolist() == [0.5, mass]
    assert int(counter) == 10 + counted


def test_bad_arguments_are_refused():
    def good():
        rows, expected, _, counter = sample(3)
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
