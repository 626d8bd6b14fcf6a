"""Rows of measurements, and rows kept between runs."""

from collections import namedtuple

from benchmarks.harness.rows import RunRows, as_text, read_rows, replace_rows, rows_of, shorten
from benchmarks.harness.turns import take_turns

FIELDS = ["name", "seed", "score", "torch", "commit"]
Run = namedtuple("Run", ["key", "score"])


def test_runs_have_a_row_each_and_only_those_without_are_performed(tmp_path):
    rows, ran = RunRows(tmp_path / "folder" / "rows.csv", FIELDS, num_keys=2), []

    def perform(run):
        ran.append(run.key)
        return {"score": str(run.score)}

    runs = [Run(("b", "1"), 0.9), Run(("a", "0"), 0.5)]
    assert rows.read() == {}
    rows.complete(runs, perform)
    rows.complete([*runs, Run(("a", "1"), 0.1)], perform)
    assert ran == [("b", "1"), ("a", "0"), ("a", "1")]
    found = read_rows(rows.path)
    assert [(row["name"], row["seed"], row["score"]) for row in found] == [
        ("a", "0", "0.5"), ("a", "1", "0.1"), ("b", "1", "0.9"),
    ]  # fmt: skip
    assert all(row["torch"] and row["commit"] for row in found)
    rows.complete([Run(("a", "0"), 0.7)], perform, again=True)
    assert rows.read()["a", "0"]["score"] == "0.7"
    assert len(rows.read()) == 3


def test_writing_replaces_only_the_rows_of_the_same_key(tmp_path):
    path, fields = tmp_path / "rows.csv", ["op", "numel"]
    replace_rows([{"op": "a", "numel": 0}, {"op": "b", "numel": 0}], path, fields)
    replace_rows([{"op": "a", "numel": 7}], path, fields)
    assert [tuple(row.values()) for row in read_rows(path)] == [("b", "0"), ("a", "7")]
    replace_rows([{"op": "a", "numel": 8}], path, fields, key=fields)
    assert len(read_rows(path)) == 3


def test_rows_have_ratios_of_medians_to_a_base():
    seconds = {"x": [2.0, 3.0, 10.0], "y": [6.0]}
    rows = rows_of(seconds, seconds["x"], "time of x", case="it", more=lambda name: {"note": name})
    assert [(row["system"], row["ratio"], row["note"]) for row in rows] == [
        ("x", "1.000", "x"), ("y", "2.000", "y"),
    ]  # fmt: skip
    assert (rows[0]["median_ms"], rows[0]["case"]) == ("3000.000", "it")
    faster = rows_of(seconds, seconds["x"], "speed of x", name="method", digits=1)
    assert [row["ratio"] for row in faster] == ["1.0", "0.5"]


def test_losses_are_means_over_ranks_and_parts():
    assert shorten([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]]) == [2, 2, 2]
    assert shorten([[float(i) for i in range(100)]], count=4) == [12, 37, 62, 87]
    assert as_text([0.12345, 2.0]) == "0.1235 2"


def test_all_take_turns_in_an_order_that_varies():
    calls = []
    runs = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    found = take_turns(runs, turns=20, warm_up=2)
    assert [sorted(calls[i : i + 3]) for i in range(0, 66, 3)] == [[*"abc"]] * 22
    assert len({tuple(calls[i : i + 3]) for i in range(0, 66, 3)}) > 3
    assert min(map(min, found.values())) == 7
    assert [len(each) for each in found.values()] == [20] * 3
