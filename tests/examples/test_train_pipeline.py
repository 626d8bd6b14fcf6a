"""The pipeline's example, run and interrupted as by a user."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.examples.interrupt import assert_ctrl_c_ends_all

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
EXAMPLE = "examples/train_pipeline.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = ["--width", "16", "--blocks", "2", "--batch-size", "8", "--steps", "24"]
DIGITS = ["--data", "digits", "--steps", "40"]


def run_example(num_ranks, *arguments):
    return run_python([*TORCHRUN, str(num_ranks), EXAMPLE, *arguments])


def run_python(command):
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


def test_trains_prints_draws_and_saves(tmp_path, monkeypatch):
    result = run_example(2, *SMALL, "--out", str(tmp_path))
    assert "steps: 100%" in result.stderr
    assert "bits per byte" in result.stderr  # beside the bar
    results = results_in(tmp_path)
    for row in (
        f"held-out bits per byte     {results['held_out']:.3f}",
        f"bubble, measured           {results['bubble']:.1%}",
        f"bubble, simulated          {results['bubble_simulated']:.1%}",
        "peak memory, rank 1",
        "96 updates",
    ):
        assert row in result.stdout
    assert results["losses"][0] > results["losses"][-1]
    assert len(results["losses"]) == 24
    assert 0 < results["held_out"] < 8
    assert results["losses_of_heads"] == []
    assert 0 < results["bubble_simulated"] < 1
    assert 0 < results["bubble"] < 1
    assert results["weight_copies"] == [2, 1]
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.syspath_prepend("examples")
    bare = importlib.import_module("byte_transformer").build_transformer(128, 16, 2, 4)
    parts = [torch.load(tmp_path / f"stage-{stage}.pt", weights_only=True) for stage in (0, 1)]
    bare.load_state_dict(parts[0] | parts[1])


@pytest.mark.slow  # test_equivalence.py tests trainers; this tests the script
def test_flushed_stages_learn_the_same_on_any_number_of_ranks(tmp_path):
    losses = {}
    for name, num_ranks, *arguments in [
        ("1 rank", 1, "--schedule", "gpipe"),
        ("looped", 2, "--schedule", "zero-bubble", "--stages", "4"),
    ]:
        folder = tmp_path / name
        run_example(num_ranks, *SMALL, *arguments, "--optimizer", "sgd", "--out", str(folder))
        losses[name] = results_in(folder)["losses"]
    assert losses["looped"] == pytest.approx(losses["1 rank"], rel=1e-4)


def test_interlocked_stages_show_the_losses_of_their_heads(tmp_path):
    result = run_example(2, *SMALL, "--schedule", "interlocking", "--out", str(tmp_path))
    results = results_in(tmp_path)
    assert "Interlocking(window=2, heads=LinearHead(num_outputs=256" in results["schedule"]
    assert "24 updates" in result.stdout
    (of_head,) = results["losses_of_heads"]
    assert len(of_head) == len(results["losses"]) == 24
    for losses in (of_head, results["losses"]):
        assert losses[0] > losses[-1]
    assert 0 < results["held_out"] < 8
    assert 0 < results["bubble_simulated"] < 1
    header, first, last = table_of_stages(result.stdout)
    assert not {"staleness", "horizon"} & set(header)  # no weights are stale
    assert {"head", "held"} <= set(header)
    shown = [f"{sum(losses[22:]) / 2:.3f}" for losses in (of_head, results["losses"])]
    assert [first[-1], last[-1]] == shown
    assert last[header.index("head")] == "-"
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")


def table_of_stages(output):
    """Return the cells of the table's lines."""
    lines = output.replace(" .. ", "..").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("stage "))
    return [line.split() for line in lines[begin : begin + 3]]


def test_digits_in_four_stages_on_one_rank(tmp_path, monkeypatch):
    choice = ["--schedule", "interlocking", "--stages", "4", "--window", "4"]
    result = run_example(1, *DIGITS, *choice, "--out", str(tmp_path))
    results = results_in(tmp_path)
    assert f"test accuracy         {results['accuracy']:.2%}" in result.stdout
    assert f"held-out nats         {results['held_out']:.3f}" in result.stdout
    assert results["losses"][0] > 0.5 + results["losses"][-1]
    assert len(results["losses_of_heads"]) == 3
    assert 0.5 < results["accuracy"] < 1  # after 40 steps; 0.1 before the first
    monkeypatch.syspath_prepend("examples")
    net, images = (importlib.import_module(name) for name in ("digits_net", "handwritten_digits"))
    bare = net.build_net_to_cut()
    parts = [torch.load(tmp_path / f"stage-{s}.pt", weights_only=True) for s in range(4)]
    bare.load_state_dict(parts[0] | parts[1] | parts[2] | parts[3])
    inputs, labels = images.load_images()[1]
    right = (bare(inputs).argmax(1) == labels).float().mean()
    assert float(right) == pytest.approx(results["accuracy"])


@pytest.mark.slow  # others train on digits; test_equivalence.py tests this schedule
def test_digits_with_another_schedule(tmp_path):
    run_example(2, *DIGITS, "--schedule", "2bw", "--out", str(tmp_path))
    results = results_in(tmp_path)
    assert results["losses"][0] > 0.5 + results["losses"][-1]
    assert 0.5 < results["accuracy"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "must be a positive integer, got 0"),
        (["--steps", "3"], "--steps must be at least 4"),
        (["--stages", "7"], "--stages must be at most the 6 layers of 4 blocks"),
        (["--data", "digits", "--stages", "5"], "must be at most the 4 layers of two convolutions"),
        (
            ["--data", "digits", "--width", "8"],
            "--blocks and --width must be used with --data text",
        ),
        (["--window", "2"], "--window must be used with --schedule interlocking, got pipeoptim"),
        (["--schedule", "interlocking", "--window", "3"], "number of stages, 2, got 3"),
        (["--batch-size", "3"], "at least one sample for each of 4 microbatches, got 3"),
        (["--width", "6"], "--width must be a multiple of the 4 heads of attention, got 6"),
        (["--schedule", "nope"], "invalid choice: 'nope'"),
    ],
)
def test_bad_arguments_are_refused(monkeypatch, capsys, arguments, message):
    monkeypatch.syspath_prepend("examples")
    monkeypatch.setattr(sys, "argv", [EXAMPLE, *arguments])
    example = importlib.import_module("train_pipeline")
    with pytest.raises(SystemExit) as end:
        example.parse_arguments(num_ranks=1)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_stages_that_ranks_do_not_divide_are_refused():
    command = [sys.executable, EXAMPLE, "--stages", "3"]
    environment = {**os.environ, "WORLD_SIZE": "2"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert result.returncode == 2
    assert "num_stages must be a multiple of num_ranks, got 3 stages for 2 ranks" in result.stderr


def test_ctrl_c_ends_all_ranks(tmp_path):
    command = [*TORCHRUN, "2", EXAMPLE, "--steps", "100000", "--out", str(tmp_path)]
    assert_ctrl_c_ends_all(command, ENVIRONMENT, shown=b"steps")
