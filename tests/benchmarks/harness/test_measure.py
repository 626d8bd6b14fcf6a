"""The benchmarks run, and their rows contain the columns' values."""

import csv

import pytest

from benchmarks.harness.measure import FIELDS, Case, Provider, measure, write_rows


def test_rows_compare_with_our_op_and_with_a_copy():
    case = Case(
        "nothing", "case", 10_000, 80_000, [Provider("ours", int), Provider("peer", sum_up)]
    )
    rows = {row["provider"]: row for row in measure(case, turns=10)}
    assert list(rows) == ["ours", "peer", "copy (non-temporal)"]
    assert all(list(row) == FIELDS for row in rows.values())
    assert rows["ours"]["speedup_of_ours"] == "1.00"
    assert rows["copy (non-temporal)"]["of_copy"] == "1.000"
    ours, peer = (float(rows[name]["median_ms"]) for name in ("ours", "peer"))
    assert float(rows["peer"]["speedup_of_ours"]) == pytest.approx(peer / ours, rel=0.5)


def sum_up():
    return sum(range(100_000))


def test_writing_replaces_only_the_rows_of_the_same_op(tmp_path):
    path = tmp_path / "rows.csv"
    row = dict.fromkeys(FIELDS, "0")
    write_rows([{**row, "op": "a"}, {**row, "op": "b"}], path)
    write_rows([{**row, "op": "a", "numel": "7"}], path)
    with path.open(newline="") as file:
        assert [(row["op"], row["numel"]) for row in csv.DictReader(file)] == [
            ("b", "0"),
            ("a", "7"),
        ]
