"""The comparison of scales: its training, and its rows."""

from benchmarks.harness.rows import read_rows
from benchmarks.subnets import compare_scales


def test_trains_and_writes_a_row(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    arguments = ["--scales", "averaged", "--seeds", "4", "--steps", "25", "--interval", "7"]
    arguments += ["--ranks", "2", "--out", str(path)]
    monkeypatch.setattr("sys.argv", ["compare_scales", *arguments])
    compare_scales.main()
    (row,) = read_rows(path)
    assert (row["scale"], row["seed"], row["ranks"], row["steps"]) == ("averaged", "4", "2", "25")
    assert float(row["score"]) < 6.5  # of 8 before the first step
    assert float(row["subnets_training"]) < 6.5
    assert row["at_steps"] == "25"
    assert row["at_score"] == row["score"]
