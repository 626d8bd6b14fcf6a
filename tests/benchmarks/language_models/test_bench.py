"""The comparison of language models in a pipeline with unsplit ones: its rows and its table."""

import sys

import pytest

from benchmarks.harness.rows import read_rows
from benchmarks.language_models import bench
from benchmarks.language_models.table import markdown

ROW = {"model": "GPT-2", "tied": "True", "parameters": "10800000", "training_bits": "3.0"}


def make_row(schedule, held_out, ranks="2", threads="1"):
    others = {"ranks": ranks, "threads": threads}
    return {**ROW, **others, "schedule": schedule, "held_out_bits": held_out}


def test_the_table_compares_with_the_unsplit_model():
    rows = [make_row("PipeOptim", "3.06"), make_row("unsplit", "3.0", "1", "2")]
    assert markdown(rows).splitlines()[2:] == [
        "| GPT-2, tied, a plain loop, 2 threads | 10.8 M | 3.0000 | 3.0000 | +0.000 % |",
        "| GPT-2, tied, `PipeOptim()`, 2 ranks | 10.8 M | 3.0000 | 3.0600 | +2.000 % |",
    ]


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
