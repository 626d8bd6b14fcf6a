"""Runs have the bits that were recorded, and resume bit for bit from the states saved then."""

import pytest

from tests.golden.runs import RUNS
from tests.golden.save import SAVED_AT, load_saved, record, resume


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_has_the_bits_that_were_recorded(ranks, kind):
    runs = ranks.run(RUNS[kind][1], record, kind)
    assert [result for _, result in runs] == load_saved(kind)["results"]


@pytest.mark.parametrize("kind", RUNS)
def test_saved_states_resume_bit_for_bit(ranks, kind):
    results = load_saved(kind)["results"]
    for got, expected in zip(ranks.run(RUNS[kind][1], resume, kind), results, strict=True):
        assert got == {**expected, "losses": expected["losses"][SAVED_AT:]}
