"""Rows, table and picture of the comparison of compressors, with a few steps."""

from dataclasses import replace

import pytest

from benchmarks.compression import compare as compare_compression
from benchmarks.compression.compare import FIELDS, Job, as_row, run
from benchmarks.compression.picture import PICTURES
from benchmarks.compression.table import by_compressor, markdown, verdict
from benchmarks.compression.tasks import TASKS
from benchmarks.compression.training import Outcome, dense_wire_bytes
from benchmarks.gossip.table import MEASURES
from benchmarks.harness.pictures import drawn
from benchmarks.harness.rows import read_rows, write_rows
from pyparallel.recommend import CANDIDATES

DIGITS, TEXT = TASKS
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}


def make_row(name="int8-ef", seed=0, score=0.9, task=DIGITS, updates=3):
    outcome = Outcome(
        losses=[[2.0, 1.0], [2.0, 3.0]], score=score, dense_bytes=4000, payload_bytes=1000.0,
        wire_bytes=750.0, residual_norm=0.5,
    )  # fmt: skip
    return as_row(Job(task, BY_NAME[name], seed, updates), outcome, 4)


def test_runs_of_a_few_steps_become_rows(tmp_path):
    tiny = replace(TEXT, batch_size=2, context=8)
    jobs = [Job(tiny, BY_NAME[name], 0, 3) for name in ("fp32", "int8-ef", "topk-ef")]
    run(jobs, 2, tmp_path / "rows.csv")
    rows = {row["compressor"]: row for row in read_rows(tmp_path / "rows.csv")}
    assert list(rows["fp32"]) == FIELDS
    assert (rows["fp32"]["payload_share"], rows["fp32"]["wire_share"]) == ("1.0000", "1.0000")
    assert float(rows["int8-ef"]["wire_share"]) == pytest.approx(0.25, abs=0.02)
    assert float(rows["topk-ef"]["payload_share"]) < 0.022
    losses = {name: [float(x) for x in row["losses"].split()] for name, row in rows.items()}
    assert {first for first, *_ in losses.values()} == {losses["fp32"][0]}  # the same batches
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


def test_the_table_has_a_line_for_each_compressor_in_their_order(tmp_path):
    rows = [
        make_row("topk-ef", score=0.85), make_row("int8-ef"), make_row("fp32", score=0.905),
        make_row("fp32", task=TEXT, score=2.0), make_row("sign-ef", task=TEXT, score=float("nan")),
    ]  # fmt: skip
    assert list(by_compressor(rows, "digits")) == ["fp32", "int8-ef", "topk-ef"]
    lines = [line for line in markdown(rows).splitlines() if "`" in line]
    assert [line.split("| ")[1].split(":")[0] for line in lines] == [
        "fp32", "int8-ef", "topk-ef", "fp32", "sign-ef"
    ]  # fmt: skip
    assert "| -0.50 | yes" in lines[1]
    assert "| -5.50 | **no**" in lines[2]
    assert drawn(PICTURES, rows, tmp_path) == ["accuracy-digits", "accuracy-text"]


def test_only_missing_rows_are_run_by_task_and_seed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    write_rows([make_row("int8-ef")], path, FIELDS)
    ran = []

    def fake_run(jobs, num_ranks, out):
        ran.append([job.key for job in jobs])
        rows = [make_row(job.candidate.name, job.seed, updates=job.updates) for job in jobs]
        kept = {tuple(row[k] for k in FIELDS[:3]): row for row in [*read_rows(out), *rows]}
        write_rows(list(kept.values()), out, FIELDS)

    monkeypatch.setattr(compare_compression, "run", fake_run)
    arguments = ["--tasks", "digits", "--compressors", "fp32", "int8-ef", "--seeds", "0", "1"]

    def main(*more):
        ran.clear()
        monkeypatch.setattr("sys.argv", ["compare", *arguments, "--out", str(path), *more])
        compare_compression.main()
        return [[(name, seed) for _, name, seed in group] for group in ran]

    second = [("fp32", "1"), ("int8-ef", "1")]
    assert main() == [[("fp32", "0")], second]
    assert main() == []
    assert main("--again") == [[("fp32", "0"), ("int8-ef", "0")], second]
    assert capsys.readouterr().out.endswith(f"{markdown(read_rows(path))}\n")
