"""``python -m pyparallel plan``: the costs of all schedules in one table."""

import re
import subprocess
import sys

import pytest


def run(*arguments, folder):
    command = [sys.executable, "-m", "pyparallel", "plan", *arguments]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": folder}
    return subprocess.run(command, check=False, **options)


def test_every_schedule_in_one_table(tmp_path):
    done = run("--stages", "4", "--microbatches", "8", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1:]
            for line in done.stdout.split("\n\n")[0].splitlines()}  # fmt: skip
    # Bubble of one step and in steady state, activations, weight copies, staleness, horizon.
    assert rows["GPipe"] == ["27.3%", "27.3%", "8", "1", "0", "0"]
    assert rows["OneForwardOneBackward"] == ["27.3%", "27.3%", "4", "1", "0", "0"]
    assert rows["Interleaved, 2 stages per rank"] == ["15.8%", "15.8%", "5.5", "1", "0", "0"]
    assert rows["ZeroBubble"] == ["11.1%", "11.1%", "4", "1", "0", "0"]
    assert rows["PipeDream"] == ["27.3%", "0.0%", "4", "4", "3 .. 0", "0"]
    assert rows["PipeDream2BW"] == ["27.3%", "0.0%", "4", "2", "1", "0"]
    assert rows["SpecTrain(variant=1)"] == ["27.3%", "0.0%", "4", "2", "3 .. 0", "3 .. 1"]
    assert rows["XPipe(weights='live')"] == ["27.3%", "0.0%", "4", "2", "1 .. 0", "1 .. 0"]
    assert rows["PipeOptim(weights='live')"] == ["27.3%", "0.0%", "4", "2", "3 .. 0", "3 .. 0"]
    assert rows["PipeMare"] == ["27.3%", "0.0%", "4", "1", "3 .. 0", "0"]
    assert {"SpecTrain(variant=2)", "Nesterov(weights='consistent')"} < set(rows)


def test_one_stage_has_no_bubble(tmp_path):
    done = run("--stages", "1", "--microbatches", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"\d+\.\d%", done.stdout)) == {"0.0%"}


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--stages", "2", "--microbatches", "2"]
    done = run(*sizes, "--out", "timelines.png", folder=tmp_path)
    assert "timelines.png" in done.stdout, done.stderr
    assert (tmp_path / "timelines.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stages", "0", "--microbatches", "4"], "num_stages must be a positive integer, got 0"),
        (
            ["--stages", "4", "--microbatches", "4", "--communication", "-1"],
            "communication must be finite and not negative, got -1.0",
        ),
        (["--stages", "4"], "the following arguments are required: --microbatches"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(tmp_path, arguments, sentence):
    done = run(*arguments, folder=tmp_path)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
