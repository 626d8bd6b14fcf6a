"""Rows, table and picture of the comparison of compressors, with a few steps."""

from dataclasses import replace

import pytest

from benchmarks.compression.compare import FIELDS, Run, perform
from benchmarks.compression.table import verdict
from benchmarks.compression.training import TASKS
from benchmarks.harness.tables import MEASURES
from pyparallel.planning.recommend import CANDIDATES

DIGITS, TEXT = TASKS
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}


@pytest.mark.slow  # two runs of two ranks
def test_runs_of_a_few_steps_have_the_same_batches():
    tiny = replace(TEXT, batch_size=2, context=8)
    rows = {name: perform(Run(tiny, BY_NAME[name], 0, 3, ranks=2)) for name in ("fp32", "topk-ef")}
    assert {*rows["fp32"]} == {*FIELDS[3:]} - {"torch", "commit"}
    assert (rows["fp32"]["payload_share"], rows["fp32"]["wire_share"]) == ("1.0000", "1.0000")
    assert float(rows["topk-ef"]["payload_share"]) < 0.022
    first, second = (row["losses"].split() for row in rows.values())
    assert first[0] == second[0]
    assert float(rows["fp32"]["residual_norm"]) == 0 < float(rows["topk-ef"]["residual_norm"])
    assert all(0 < float(row["score"]) < 9 for row in rows.values())


def test_goals_limit_how_much_worse_it_gets():
    for found, measure, word in [
        ([-0.5, -1.2], 0, "yes"),
        ([-0.9, -1.2], 0, "**no**"),
        ([+5.0], 0, "yes"),
        ([+1.9], 1, "yes"),
        ([+2.1], 1, "**no**"),
        ([-9.0], 1, "yes"),
        ([], 0, ""),
        ([float("nan")], 1, "**no**"),  # it diverged
    ]:
        assert verdict(found, MEASURES[measure]) == word, found
