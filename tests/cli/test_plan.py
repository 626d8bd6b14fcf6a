"""``python -m pyparallel plan``: the costs of all schedules in one table."""

import re
import sys

import pytest

from pyparallel.__main__ import main

LINK = ["--replicas", "8", "--rate", "100", "--parameters", "1e6"]


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Run the command in this process, in another folder; return what it printed."""
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["pyparallel", "plan", *arguments])
        main()
        return capsys.readouterr().out

    return run_here


def test_every_schedule_in_one_table(call):
    printed = call()  # the defaults
    assert printed.startswith("4 stages, 8 microbatches\n\n")
    assert printed == call("--stages", "4", "--microbatches", "8")
    rows = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1:]
            for line in printed.split("\n\n")[1].splitlines()}  # fmt: skip
    # Bubble of one step and in steady state, activations, weight copies, staleness, horizon.
    assert rows["GPipe"] == ["27.3%", "27.3%", "8", "1", "0", "0"]
    assert rows["OneForwardOneBackward"] == ["27.3%", "27.3%", "4", "1", "0", "0"]
    assert rows["Interleaved, 2 stages per rank"] == ["15.8%", "15.8%", "5.5", "1", "0", "0"]
    assert rows["ZeroBubble"] == ["11.1%", "11.1%", "4", "1", "0", "0"]
    assert rows["PipeDream"] == ["27.3%", "0.0%", "4", "4", "3 .. 0", "0"]
    assert rows["PipeDream2BW(weights='consistent')"] == ["27.3%", "0.0%", "4", "2", "1", "0"]
    assert rows["SpecTrain(variant=1)"] == ["27.3%", "0.0%", "4", "2", "3 .. 0", "3 .. 1"]
    assert rows["XPipe(weights='live')"] == ["27.3%", "0.0%", "4", "2", "1 .. 0", "1 .. 0"]
    assert rows["PipeOptim(weights='live')"] == ["27.3%", "0.0%", "4", "2", "3 .. 0", "3 .. 0"]
    assert rows["PipeMare"] == ["27.3%", "0.0%", "4", "1", "3 .. 0", "0"]
    assert {"SpecTrain(variant=2)", "Nesterov(weights='consistent')"} < set(rows)


def test_a_round_with_replicas_is_a_wait_unless_others_hide_it(call):
    rows = call("--microbatches", "4", "--round", "4").split("\n\n")[1].splitlines()
    found = {each[0]: each[1:3] for each in (re.split(r"\s{2,}", row) for row in rows)}
    # A step of 12, and 9 of warm-up and cool-down; AllReduce() makes it 4 longer.
    assert found["GPipe"] == found["OneForwardOneBackward"] == ["52.0%", "52.0%"]
    # An update each 3, of which each waits for a round of 4; an update of 4 microbatches hides it.
    assert found["PipeOptim(weights='live')"][1] == "25.0%"
    assert found["PipeDream2BW(weights='consistent')"][1] == "0.0%"


def test_the_round_is_simulated(call):
    """Of replicas on their link: 16 MB of a stage, with 7/4 as many bytes for AllReduce()."""
    times = ("--microbatches", "4", "--forward", "0.25", "--backward", "0.5")
    link = ("--replicas", "8", "--rate", "128", "--parameters", "16e6", "--latency", "0")
    head, rows = call(*times, *link).split("\n\n")[:2]
    assert head.splitlines()[1] == (
        "8 replicas: 1 s an update for rounds of SGP(overlap=1), 1.75 s for AllReduce()"
    )
    expected = [call(*times, "--round", seconds).split("\n\n")[1] for seconds in ("1.75", "1")]
    flushing, streaming = (each.splitlines() for each in expected)
    assert rows.splitlines() == [*flushing[:5], *streaming[5:]]
    # Outer steps are waited for, here once in 2000 updates.
    head, rows = call(*times, *link, "--algorithm", "DiLoCo(2000)").split("\n\n")[:2]
    assert "8 replicas: 0.000875 s an update for rounds of DiLoCo(2000), 1.75 s" in head
    waits = {each.split()[0]: re.split(r"\s{2,}", each)[2] for each in rows.splitlines()}
    assert waits["PipeDream"] == "0.1%"
    _, rows = call(*times, *link, "--algorithm", "SGP(Ring())").split("\n\n")[:2]
    waits = {each.split()[0]: re.split(r"\s{2,}", each)[2] for each in rows.splitlines()}
    assert waits["PipeDream"] == f"{2 / 2.75:.1%}"


def test_no_share_is_a_negative_zero(call):
    printed = call("--stages", "2", "--microbatches", "4", "--forward", "0.1", "--backward", "0.2")
    assert "-0.0%" not in printed


def test_one_stage_has_no_bubble(call):
    printed = call("--stages", "1", "--microbatches", "1")
    assert set(re.findall(r"\d+\.\d%", printed)) == {"0.0%"}


def test_the_picture(call, tmp_path):
    pytest.importorskip("matplotlib")
    assert "timelines.png" in call(
        "--stages", "2", "--microbatches", "2", "--round", "1", "--out", "timelines.png"
    )
    assert (tmp_path / "timelines.png").stat().st_size > 10_000


def test_bad_arguments_are_refused_in_one_sentence(call, capsys):
    for arguments, sentence in [
        (["--stages", "0", "--microbatches", "4"], "num_stages must be a positive integer, got 0"),
        (
            ["--stages", "4", "--microbatches", "4", "--communication", "-1"],
            "communication must be finite and not negative, got -1.0",
        ),
        (
            ["--latency", "1", "--rate", "1"],
            "plan: --replicas, --rate and --parameters must be given together, without --round, "
            "got rate, latency",
        ),
        ([*LINK, "--round", "4"], "without --round, got replicas, rate, parameters, round"),
        ([*LINK, "--stages", "0"], "num_stages must be a positive integer, got 0"),
        ([*LINK, "--replicas", "0"], "replicas must be a positive integer, got 0"),
        ([*LINK, "--rate", "0"], "rate must be greater than 0 and finite, got 0.0"),
        ([*LINK, "--parameters", "0"], "message_bytes must be greater than 0, got 0.0"),
        ([*LINK, "--algorithm", "AllReduce()"], "replicas must average weights with PipeDream"),
        (
            [*LINK, "--algorithm", "ADPSGD(Ring())"],
            "others are not simulated with a pipeline",
        ),
        (["--stages", "four"], "argument --stages: invalid int value: 'four'"),
    ]:
        with pytest.raises(SystemExit) as ended:
            call(*arguments)
        assert ended.value.code not in (None, 0), arguments
        assert sentence in f"{ended.value.code}{capsys.readouterr().err}", arguments
