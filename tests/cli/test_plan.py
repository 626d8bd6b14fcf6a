"""``python -m pyparallel plan``: the costs of all schedules in one table."""

import re
import sys

import pytest

from pyparallel.__main__ import main


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
        (["--stages", "four"], "argument --stages: invalid int value: 'four'"),
    ]:
        with pytest.raises(SystemExit) as ended:
            call(*arguments)
        assert ended.value.code not in (None, 0), arguments
        assert sentence in f"{ended.value.code}{capsys.readouterr().err}", arguments
