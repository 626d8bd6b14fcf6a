"""Rows kept between runs."""

from benchmarks.harness.rows import merge, read_rows, shorten, write_rows


def key_of(row):
    return row["name"], row["seed"]


def make_row(seed, score):
    return {"name": "it", "seed": str(seed), "score": str(score)}


def test_a_row_replaces_only_that_of_its_key(tmp_path):
    rows = merge([], make_row(1, 0.9), key_of)
    rows = merge(rows, make_row(0, 0.9), key_of)
    rows = merge(rows, make_row(0, 0.5), key_of)
    write_rows(rows, tmp_path / "folder" / "rows.csv", ["name", "seed", "score"])
    again = read_rows(tmp_path / "folder" / "rows.csv")
    assert again == rows
    assert [(row["seed"], row["score"]) for row in again] == [("0", "0.5"), ("1", "0.9")]
    assert read_rows(tmp_path / "none.csv") == []


def test_losses_are_means_over_ranks_and_parts():
    assert shorten([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]]) == [2, 2, 2]
    assert shorten([[float(i) for i in range(100)]], count=4) == [12, 37, 62, 87]
