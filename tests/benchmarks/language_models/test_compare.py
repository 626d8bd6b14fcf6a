"""The comparison of language models in pipelines: one update of each schedule is that of all."""

import pytest

from benchmarks.language_models.compare import SCHEDULES, Run, perform
from benchmarks.language_models.table import by_depth


@pytest.mark.nightly
@pytest.mark.slow  # imports transformers in each rank
def test_the_first_updates_are_synchronous():
    rows = []
    for schedule in SCHEDULES:
        run = Run("GPT-2", "AdamW", schedule, "2", "0.001", 0, "1", steps=10)
        rows.append(perform(run) | run._asdict())
    first = [row["losses"].split()[0] for row in rows]
    assert len(set(first)) == 1  # by the initial weights
    assert int(rows[0]["parameters"]) > 10_000_000
    assert rows[0]["losses"] != rows[1]["losses"]
    table = by_depth([{name: str(value) for name, value in row.items()} for row in rows])
    assert table.count("+0.00 %") == 2  # at the same rate, which is the best there is


@pytest.mark.slow  # imports transformers
@pytest.mark.nightly
def test_a_stage_of_eight_may_have_no_matrix_for_muon():
    run = Run("GPT-2", "Muon", "PipeDream2BW", "8", "0.002", 0, "1", steps=2)
    assert len(perform(run)["losses"].split()) == 2
