"""The comparison of language models in a pipeline with unsplit ones: its rows."""

import sys

import pytest

from benchmarks.harness.rows import read_rows
from benchmarks.language_models import bench


@pytest.mark.slow  # imports transformers in each rank
def test_a_flushed_pipeline_has_the_losses_of_the_unsplit_model(monkeypatch, tmp_path):
    path = tmp_path / "rows.csv"
    arguments = ["bench", "--steps", "3", "--model", "GPT-2", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    bench.main()
    rows = {row["schedule"]: row for row in read_rows(path)}
    assert list(rows) == ["unsplit", "OneForwardOneBackward", "PipeOptim"]
    unsplit, flushed, streamed = rows.values()
    assert int(unsplit["parameters"]) > 10_000_000
    for name in ("training_bits", "held_out_bits"):
        assert float(flushed[name]) == pytest.approx(float(unsplit[name]), rel=1e-4)
    first = [row["losses"].split()[0] for row in rows.values()]
    assert len(set(first)) == 1  # PipeOptim's first batch is read by the initial weights too
    assert streamed["losses"] != unsplit["losses"]
