"""A dry run of the compressors' benchmark; no time is asserted."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compression import bench as bench_compression
from benchmarks.compression import cost, links
from benchmarks.compression.bench import FIELDS, GOALS, PARTS, print_goals, rows_of_links
from benchmarks.compression.picture import PICTURES
from benchmarks.compression.systems import ALONE, SYSTEMS
from benchmarks.harness.pictures import drawn
from pyparallel.recommend import CANDIDATES

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_dry_run_measures_every_part(tmp_path):
    rows = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "benchmarks.compression.bench", "--dry-run", "--out", rows]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with rows.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == FIELDS
    assert {row["part"] for row in table} == {*PARTS}
    linked = {row["system"]: row for row in table if row["part"] == "links"}
    assert set(linked) == {system.name for system in SYSTEMS}
    for name, row in linked.items():
        # What torch refuses is noted; ours must run.
        assert bool(row["median_ms"]) != bool(row["note"]), row
        assert not row["note"] or name.startswith("torch "), row
    assert linked["fp32"]["payload_share"] == "1.0000"
    assert float(linked["topk-ef"]["payload_share"]) < 0.022
    coded = {row["system"] for row in table if row["part"] == "cost"}
    assert coded == {cost.BACKWARD, *(candidate.name for candidate in CANDIDATES[1:])}
    halves = [row["system"] for row in table if row["part"] == "power_sgd"]
    assert len(halves) == len(set(halves)) == 4
    assert drawn(PICTURES, table, tmp_path) == ["links", "encoding", "power-sgd"]


def test_rows_of_failures_have_a_reason():
    speeds = {
        "fp32": links.Speed([0.2, 0.4], 3e6, 1000),
        ALONE: links.Speed([0.15], 0.0, 0),
        "torch bf16": links.Speed(problem="TypeError: no"),
    }
    rows = rows_of_links(speeds, "100 Mbit/s", bench_compression.DRY.on_links)
    assert [row["ratio"] for row in rows] == ["1.000", "0.500", ""]
    assert [row["wire_mb"] for row in rows] == ["3.000", "0.000", "0.000"]
    assert rows[2]["note"] == "TypeError: no"
    assert rows[2]["payload_share"] == ""


def raises(sentence):
    if sentence is None:
        raise AssertionError
    raise ValueError(sentence)


def test_errors_are_described_by_their_first_words():
    for sentence, described in [
        ("one\ntwo", "ValueError: one"),
        ("Got the following error when running the callback: IndexError: x", "IndexError: x"),
        (None, "AssertionError: in raises"),
    ]:
        with pytest.raises((ValueError, AssertionError)) as caught:
            raises(sentence)
        assert links.describe(caught.value).endswith(described)


def test_goals_are_printed_as_reached_or_missed(capsys):
    rows = [
        {"part": goal.part, "system": goal.name, "case": "it", goal.field: str(goal.limit * factor)}
        for goal, factor in zip(GOALS, (0.9, 1.1), strict=True)
    ]
    print_goals(rows)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("reached")
    assert second.endswith("MISSED")


def test_sent_bytes_are_read_off_the_link(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = links.read_sent()
    assert links.read_sent() >= before >= 0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-link")
    with pytest.raises(RuntimeError, match="no network interface no-such-link"):
        links.read_sent()
