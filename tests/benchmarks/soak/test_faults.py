"""The faults of ``make soak``: what its judge sees, and a handful of its trials."""

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak import __main__ as soak
from benchmarks.soak.faults import campaign, table
from benchmarks.soak.faults.judge import FIELDS, OK, Reading, base_row, judge, read
from benchmarks.soak.faults.plan import FAULTS, TRAINERS, make_trial, plan
from benchmarks.soak.faults.trial import End, Outcome
from pyparallel.pipeline.schedules import EVERY_SCHEDULE

ROOT = Path(__file__).resolve().parents[3]
GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6528. GLHF!"
CLEAR = "rank 0, step 12: the all-reduce failed: rank 2 died or ended"

TEXTS = [
    (CLEAR, Reading(True, (), True, False)),
    (f"{CLEAR} ({GLOO})", Reading(True, (), True, False)),
    (GLOO, Reading(False, (), False, True)),
    (f"rank 0: the all-gather failed: a rank died ({GLOO})", Reading(False, (), False, False)),
    ("rank 0, step 3: edge 1 -> 0 failed: rank 1 died", Reading(False, (1,), True, False)),
    ("rank 0: ranks 1 and 2 did not respond within 6 s", Reading(True, (1,), False, False)),
    ("stage 1 on rank 2 failed in the forward (1F5)", Reading(True, (), True, False)),
    (f"hook: PeerError: {CLEAR}\n\nAt:\n  ddp.py(12): run", Reading(True, (), True, False)),
]


def test_texts_are_read():
    for text, reading in TEXTS:
        assert read(text, victim=2) == reading, text
    edge = "rank 0, step 3: the message on edge 2 -> 0 from rank 2 was not delivered"
    assert [read(edge, 2, cut=cut).names for cut in (False, True)] == [False, True]


def test_the_plan_is_broad_and_repeatable():
    trials = list(plan(0))
    assert trials == list(plan(0)) != list(plan(1))
    assert len(trials) == len({(each.fault, each.trainer) for each in trials}) >= 150
    assert {each.fault for each in trials} == set(FAULTS)
    struck = [sum(each.trainer == name for each in trials) for name in TRAINERS]
    assert min(struck) >= 3
    assert len(TRAINERS) > 2 * len(EVERY_SCHEDULE)
    assert all(each.victim == 0 for each in trials if each.what.hosts_store)


KILL = replace(make_trial("kill -9", "SGP", 0), victim=2)
SHORT = replace(make_trial("SIGSTOP, short", "SGP", 0), victim=2)
STOP = replace(make_trial("SIGSTOP, too long", "SGP", 0), victim=2)
DIED, DONE = End(-9), End(0, digest="a")


def raised(text, **values):
    return End(1, ("pyparallel.comm.PeerError", text), 1.0, **values)


VERDICTS = [
    (KILL, [raised(CLEAR), raised(CLEAR), DIED, raised(CLEAR)], OK),
    (KILL, [raised(CLEAR), End(None), DIED, raised(CLEAR)], "rank 1 hangs"),
    (KILL, [raised(CLEAR), End(-6), DIED, raised(CLEAR)], "rank 1 is aborted: -6; rank 1 raised n"),
    (KILL, [raised(CLEAR), DONE, DIED, raised(CLEAR)], "rank 1 raised nothing"),
    (
        KILL, [raised(CLEAR), raised(GLOO), DIED, raised(CLEAR)],
        "rank 1 does not name the victim; rank 1 has no step",
    ),
    (
        KILL, [raised(CLEAR), raised(f"{CLEAR}; rank 3 died"), DIED, raised(CLEAR)],
        "rank 1 blames 3",
    ),
    (STOP, [raised(CLEAR), raised(CLEAR), DONE, raised(CLEAR)], "rank 2 raised nothing"),
    (SHORT, [DONE] * 4, OK),
    (SHORT, [DONE, DONE, End(0, digest="b"), DONE], "other parameters"),
    (SHORT, [DONE, DONE, DONE, raised(CLEAR)], "rank 3 raised"),
]  # fmt: skip


def test_broken_requirements_are_seen():
    for trial, ends, verdict in VERDICTS:
        row = judge(trial, Outcome(ends, struck=True), ["a"] * 4)
        assert row["verdict"].startswith(verdict), (row["verdict"], verdict)
        assert set(row) <= set(FIELDS)
    assert judge(SHORT, Outcome([DONE] * 4, 2, struck=True), None)["verdict"] == "2 processes left"
    assert "did not strike" in judge(SHORT, Outcome([DONE] * 4), None)["verdict"]


def test_tables_count_trials_before_and_after():
    found = [judge(KILL, Outcome(ends, struck=True), None) for _, ends, _ in VERDICTS[:2]]
    then, now = ({field: str(row.get(field, "")) for field in FIELDS} for row in found[::-1])
    skipped = dict.fromkeys(FIELDS, "") | {"fault": "link cut", "verdict": "skipped: no namespace"}
    lines = table.by_fault([now, skipped], [then, skipped]).splitlines()
    assert lines[2].startswith("| kill -9 | 1 | 1 → 0 | 0 | 2 → 3 | 2 → 3 | 0 | 2 → 3 | 0 | 1.0 |")
    assert lines[3].startswith("| link cut | 0 | 0 |")
    assert lines[4].endswith("| 1 → 0 |")


def test_links_that_cannot_be_cut_are_skipped(monkeypatch, tmp_path, capsys):
    trial = make_trial("link cut", "SGP", 0)
    runner = object.__new__(campaign.Runner)
    runner._refusal = "no network namespace: not permitted"
    row = runner.run(trial)
    assert row == base_row(trial) | {"verdict": f"skipped: {runner._refusal}"}
    broken = judge(KILL, Outcome([End(None), DIED, DIED, DIED], struck=True), None)
    monkeypatch.setattr(campaign, "run_all", lambda trials: iter([row, broken]))
    path = tmp_path / "rows.csv"
    options = soak.parse(["--part", "faults", "--only", "link cut", "--out", str(path)])
    assert [each[:12] for each in soak.watch_faults(options)] == ["kill -9, SGP"]
    assert path.read_text().count("skipped: no network namespace") == 1
    assert "skipped: no network namespace" in capsys.readouterr().out


HANDFUL = [
    ("kill -9", "SGP"),
    ("kill -9", "PipeDream"),
    ("exception", "GPipe, two stages on a rank"),
    ("sys.exit(0)", "AllReduce"),
    ("kill -9 in consensus()", "LocalSGD"),
    ("early return", "SubnetTrainer"),
]


@pytest.mark.nightly
@pytest.mark.slow  # six trials, two at a time
def test_survivors_end_and_name_the_rank_that_failed():
    rows = campaign.run_all([make_trial(fault, trainer, 0) for fault, trainer in HANDFUL])
    assert {(row["fault"], row["trainer"]): row["verdict"] for row in rows} == dict.fromkeys(
        HANDFUL, OK
    )


def marked(mark):
    """Return the processes with a mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=str)
def test_a_campaign_that_is_killed_leaves_nothing(number, tmp_path):
    mark = f"campaign={uuid.uuid4()}"
    only = ["--only", "SIGSTOP, too long", "link cut"]
    command = [sys.executable, "-m", "benchmarks.soak", "--part", "faults", *only]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "rows.csv")],
        cwd=ROOT,
        env={**os.environ, "MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while len(marked(mark)) < 10:  # both servers and the ranks of both trials
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        process.wait(30)
        while left := marked(mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
