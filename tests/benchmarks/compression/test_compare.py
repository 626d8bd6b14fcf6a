"""Rows, table and picture of the comparison of compressors, with a few steps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.compression.compare import FIELDS, Run, columns_of, find_runs, perform
from benchmarks.compression.table import verdict
from benchmarks.compression.training import TASKS, Outcome, dense_wire_bytes
from benchmarks.harness.tables import MEASURES
from pyparallel.recommend import CANDIDATES

DIGITS, TEXT = TASKS
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}


def make_row(name="int8-ef", seed=0, score=0.9, task=DIGITS, updates=3):
    outcome = Outcome([2.0, 1.0], score, 4000, 1000.0, 750.0, residual_norm=0.5)
    run = Run(task, BY_NAME[name], seed, updates)
    return dict(zip(FIELDS, run.key, strict=False)) | columns_of(run, [outcome] * 4)


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


def test_shares_are_of_dense_messages_and_of_a_ring_all_reduce():
    row = make_row()
    assert dense_wire_bytes(4000, 4) == 6000
    assert (row["payload_share"], row["wire_share"]) == ("0.2500", "0.1250")


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


def test_runs_are_of_the_chosen_tasks_and_compressors():
    options = SimpleNamespace(tasks=["digits"], seeds=None)
    options.compressors = ["fp32", "topk-ef-warmed", "sign-64-ef"]
    found = find_runs(options)
    assert [run.key[1:] for run in found] == [
        (name, str(seed)) for seed in (0, 1, 2) for name in ("fp32", "sign-64-ef")
    ]
    assert {run.updates for run in found} == {DIGITS.updates}
