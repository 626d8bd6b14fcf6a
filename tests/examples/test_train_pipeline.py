"""The pipeline's example: run as a user runs it, and interrupted as a user interrupts it."""

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


def run_example(num_ranks, *arguments):
    command = [*TORCHRUN, str(num_ranks), EXAMPLE, *SMALL, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


def test_trains_prints_draws_and_saves(tmp_path, monkeypatch):
    result = run_example(2, "--out", str(tmp_path))
    assert "steps: 100%" in result.stderr
    assert "bits per byte" in result.stderr  # beside the bar
    results = results_in(tmp_path)
    for row in (
        f"held-out bits per byte     {results['held_out_bits']:.3f}",
        f"waiting, measured          {results['waiting']:.1%}",
        f"waiting, simulated         {results['waiting_on_paper']:.1%}",
        "peak memory, rank 1",
        "96 updates",
    ):
        assert row in result.stdout
    assert results["losses"][0] > results["losses"][-1]
    assert len(results["losses"]) == 24
    assert 0 < results["held_out_bits"] < 8
    assert 0 < results["waiting_on_paper"] < 1
    assert 0 < results["waiting"] < 1
    assert results["weight_copies"] == [2, 1]
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.syspath_prepend("examples")
    bare = importlib.import_module("byte_transformer").build_transformer(128, 16, 2, 4)
    parts = [torch.load(tmp_path / f"stage-{stage}.pt", weights_only=True) for stage in (0, 1)]
    bare.load_state_dict(parts[0] | parts[1])


def test_flushed_stages_learn_the_same_however_they_are_dealt(tmp_path):
    losses = {}
    for name, num_ranks, *arguments in [
        ("1 rank", 1, "--schedule", "gpipe"),
        ("looped", 2, "--schedule", "zero-bubble", "--stages", "4"),
    ]:
        folder = tmp_path / name
        run_example(num_ranks, *arguments, "--optimizer", "sgd", "--out", str(folder))
        losses[name] = results_in(folder)["losses"]
    assert losses["looped"] == pytest.approx(losses["1 rank"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "must be a positive whole number, got 0"),
        (["--steps", "3"], "--steps must be at least 4"),
        (["--stages", "7"], "--stages must be at most the 6 layers of 4 blocks"),
        (["--batch-size", "3"], "at least one sample for each of 4 microbatches, got 3"),
        (["--width", "6"], "--width must be a multiple of the 4 heads of attention, got 6"),
        (["--schedule", "nope"], "invalid choice: 'nope'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    command = [sys.executable, EXAMPLE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_stages_that_cannot_be_dealt_are_refused():
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
