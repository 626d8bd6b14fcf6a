"""``python -m pyparallel recommend``: its table and recommendation, alone and under torchrun."""

import argparse
import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pyparallel.__main__ import main
from pyparallel.cli.recommend import add_arguments, advise, advise_algorithms, describe, report
from pyparallel.planning.recommend import CANDIDATES, StepTime
from pyparallel.planning.recommend.candidates import OUTER_STEPS
from pyparallel.planning.recommend.workload import transformer
from pyparallel.planning.simulate import Cost, Profile

SMALL = ["--parameters", "8e4", "--batch", "1", "--length", "8"]


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def predictions(**steps):
    """Step times by name, in seconds; 100 by default."""
    return [
        StepTime(Cost(c.name, 0.0, 1e6, 2e6, 1), 0.1, steps.get(c.name, 100.0)) for c in CANDIDATES
    ]


def test_all_candidates_are_in_the_table(tmp_path):
    options = ("--bandwidth", "100", "--latency", "0.1", "--ranks", "4")
    text = report(parse(*SMALL, *options, "--save-profile", str(tmp_path / "profile.json")))
    profile = Profile.read(tmp_path / "profile.json")
    assert (profile.rate, profile.latency) == (1.25e7, 1e-4 / 4)  # four messages one by one
    assert 0 < profile.computing < 10
    assert 0 < profile.forward_share < 1
    head, table, _, outer, sentence = text.split("\n\n")
    assert "4 ranks, 100 Mbit/s, latency 0.1 ms" in head
    rows = {line.split()[0]: line.split() for line in table.splitlines()[1:]}
    assert set(rows) == {candidate.name for candidate in CANDIDATES}
    assert rows["fp32"][3] == "100.0%"
    assert rows["fp32"][-2] == rows["bf16"][-1] == "1.00x"
    times = [float(line.split()[-4]) for line in table.splitlines()[1:]]
    assert times == sorted(times)
    assert sentence.startswith("Use ")
    rows = {line.split()[0]: line for line in outer.splitlines()[1:]}
    assert list(rows) == ["SGP", *(type(each).__name__ for each in OUTER_STEPS)]
    assert " 1 step " in rows["SGP"]
    assert " 500 steps " in rows["DiLoCo"]


def read_steps(text):
    """Return the seconds of the step in both tables, by name."""
    rows = [line.replace(",", "").split() for line in text.splitlines() if line.endswith("x")]
    return {row[0]: float(row[row.index("ms", -4) - 1]) / 1e3 for row in rows}


@pytest.mark.slow
def test_a_profile_stands_for_the_machine_that_it_was_measured_on(tmp_path):
    path = tmp_path / "profile.json"
    Profile(0.5, 0.2, stepping=0.125, rate=1.25e5, latency=0.01).write(path)
    options = (*SMALL, "--profile", str(path), "--ranks", "4")
    text = report(parse(*options, "--save-profile", str(tmp_path / "copy.json")))
    assert "buckets: forward 100.0 ms, backward 400.0 ms" in text
    assert "4 ranks, 1 Mbit/s, latency 40 ms" in text
    copy = Profile.read(tmp_path / "copy.json")
    assert copy == Profile.read(path)
    steps = read_steps(text)
    sent = 1.5 * transformer(8e4, 1, 8, torch.device("cpu")).num_bytes / 1.25e5  # seconds
    assert steps["fp32"] == pytest.approx(0.5 + 0.125 + 0.04 + sent, rel=1e-3)
    assert steps["DiLoCo"] == pytest.approx(0.625, rel=0.02)
    slowed = read_steps(report(parse(*options, "--bandwidth", "1e6", "--stragglers", "slow:0=3.0")))
    assert slowed["fp32"] == pytest.approx(1.5 + 0.125, rel=0.05)
    assert slowed["DiLoCo"] == pytest.approx(1.5 + 0.125, rel=0.05)


def test_a_wrong_profile_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    for values, sentence in [
        ('{"version": 1, "computing": 0.5}', "--bandwidth must be given in Mbit/s, or a --profile"),
        ('{"version": 2, "computing": 0.5}', "json, line 1: version must be 1, got 2"),
        ('{"version": 1, "computing": -1}', "computing must be a number greater than 0, got -1"),
        ('{"version": 1, "computing": 1, "stepping": -1}', "stepping must be a number, at least 0"),
    ]:
        path.write_text(values)
        with pytest.raises(SystemExit, match=f"recommend: .*{sentence}"):
            report(parse(*SMALL, "--profile", str(path)))
    with pytest.raises(SystemExit, match="nothing"):
        report(parse(*SMALL, "--profile", str(tmp_path / "nothing.json")))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
def test_progress_is_shown_on_stderr(monkeypatch):
    arguments = parse(*SMALL, "--bandwidth", "100")
    names = [each.name for each in CANDIDATES] + [type(each).__name__ for each in OUTER_STEPS]
    total = len(names) + 1
    lines = [f"measuring 1 of {total}: forward and backward"]
    lines += [f"measuring {i} of {total}: {name}" for i, name in enumerate(names, 2)]
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert "measuring" not in report(arguments)
        if stream.isatty():  # each line replaces the one before; the last is cleared
            assert stream.getvalue().split("\r\x1b[K") == ["", *lines, ""]
        else:
            assert stream.getvalue().splitlines() == lines


def test_the_table_is_sorted_by_step_time():
    lines = describe(predictions(fp32=0.3, bf16=0.2, int8=0.1), 1_000_000)
    assert [line[0] for line in lines[:3]] == ["int8", "bf16", "fp32"]
    assert lines[0][1:] == (
        "1.00 MB", "25.0%", "2.00 MB", "0.0 ms", "100.0 ms", "100.0 ms", "3.00x", "2.00x"
    )  # fmt: skip


def test_the_recommendation():
    for steps, sentence in [
        (
            {"fp32": 0.1, "bf16": 0.099},
            "Use plain fp32: no compressor shortens a step by more than 5%",
        ),
        ({"fp32": 0.4, "bf16": 0.2, "int8": 0.195}, "Use plain bf16: 2.00 times as fast as fp32"),
        (
            {"fp32": 0.4, "bf16": 0.2, "int8": 0.1},
            "Use int8, Int8(block_size=256, seed=None): 4.00 times as fast as fp32 and 2.00 times",
        ),
    ]:
        assert advise(predictions(**steps)).startswith(sentence)


def test_algorithms_are_recommended_where_they_are_faster():
    def algorithms(*steps):
        names = ["SGP", *(type(each).__name__ for each in OUTER_STEPS)]
        pairs = zip(names, steps, strict=True)
        return [StepTime(Cost(name, 0.0, 1e6, 2e6, 1), 0.1, step) for name, step in pairs]

    compressed = predictions(fp32=0.4, int8=0.1)
    for steps, best, ratio in [
        ((0.3, 0.05, 0.04, 0.039, 0.06), "StreamingDiLoCo()", 2.5),
        ((0.05, 0.05, 0.048, 0.06, 0.06), "SGP(overlap=1)", 2),
    ]:
        (sentence,) = advise_algorithms(compressed, algorithms(*steps))
        assert sentence.startswith(
            f"Averages of weights are faster still: gossip.{best} {ratio:.2f} times as fast as "
        )
    assert advise_algorithms(compressed, algorithms(0.11, 0.1, 0.096, 0.2, 0.3)) == []


def test_bad_arguments_are_refused_in_one_sentence():
    for arguments, sentence in [
        ([], "--bandwidth must be given in Mbit/s, or a --profile with a rate, or the command"),
        (["--bandwidth", "0"], "--bandwidth must be greater than 0 and finite, got 0.0"),
        (["--bandwidth", "nan"], "--bandwidth must be greater than 0 and finite, got nan"),
        (["--bandwidth", "9", "--latency", "-1"], "--latency must be finite and not negative, got"),
        (["--bandwidth", "9", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--bandwidth", "9", "--batch", "0"], "--batch must be at least 1, got 0"),
        (["--bandwidth", "9", "--stragglers", "slow:2=3"], "slow ranks must be from 0 to 1, got"),
        (["--bandwidth", "9", "--stragglers", "0.1"], "stragglers must be such as lognormal:0.1"),
    ]:
        with pytest.raises(SystemExit, match=f"recommend: {sentence}"):
            report(parse(*SMALL, *arguments))


def test_link_options_are_refused_under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(SystemExit, match=r"--ranks must not be given under torchrun, .*got 4"):
        report(parse(*SMALL, "--ranks", "4"))
    with pytest.raises(SystemExit, match=r"--profile must not be given under torchrun, .*got p\."):
        report(parse(*SMALL, "--profile", "p.json"))


def print_as_under_torchrun(rank):
    """Return what a rank prints, and the progress that it shows."""
    shown, progress = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="1", LOCAL_RANK=str(rank)),
        mock.patch.object(sys, "argv", ["pyparallel", "recommend", *SMALL]),
        mock.patch.object(dist, "init_process_group"),  # the group of the test serves
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(progress),
    ):
        main()
    return shown.getvalue(), progress.getvalue()


def assert_is_for_two_ranks(printed):
    assert printed.count("\nUse ") == 1
    assert printed.count("2 ranks, ") == 1
    assert printed.count("\nbf16 ") == 1


@pytest.mark.slow
def test_on_two_ranks_the_link_is_measured_and_only_rank_0_prints(ranks):
    (first, progress), second = ranks.run(2, print_as_under_torchrun)
    assert_is_for_two_ranks(first)
    assert f"measuring 2 of {len(CANDIDATES) + len(OUTER_STEPS) + 1}: fp32\n" in progress
    assert second == ("", "")


@pytest.mark.slow  # the same, started as a user does
def test_under_torchrun_only_rank_0_prints(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "-m", "pyparallel", "recommend", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
    done = subprocess.run(command, check=False, env=environment, **options)
    assert done.returncode == 0, done.stderr
    assert_is_for_two_ranks(done.stdout)
