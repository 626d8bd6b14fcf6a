"""The pipeline's example, run and interrupted as by a user."""

import importlib
import json

import pytest
import torch

from tests.examples.as_user import assert_ctrl_c_ends_all, run_example

EXAMPLE = "train_pipeline.py"
SMALL = ["--width", "16", "--blocks", "2", "--batch-size", "8", "--steps", "24"]
DIGITS = ["--data", "digits", "--steps", "40"]

pytestmark = pytest.mark.slow  # test_short_runs.py has a short run


def results_in(folder):
    return json.loads((folder / "results.json").read_text())


def test_trains_prints_draws_and_saves(tmp_path, monkeypatch):
    result = run_example(EXAMPLE, 2, *SMALL, "--out", tmp_path)
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


def test_flushed_stages_learn_the_same_on_any_number_of_ranks(tmp_path):
    losses = {}
    for name, num_ranks, *arguments in [
        ("1 rank", 1, "--schedule", "gpipe"),
        ("looped", 2, "--schedule", "zero-bubble", "--stages", "4"),
    ]:
        folder = tmp_path / name
        few = [*SMALL[:-1], "8", "--optimizer", "sgd"]
        run_example(EXAMPLE, num_ranks, *few, *arguments, "--out", folder)
        losses[name] = results_in(folder)["losses"]
    assert losses["looped"] == pytest.approx(losses["1 rank"], rel=1e-4)


def test_digits_in_four_stages_on_one_rank(tmp_path, monkeypatch):
    choice = ["--schedule", "interlocking", "--stages", "4", "--window", "4"]
    result = run_example(EXAMPLE, 1, *DIGITS, *choice, "--out", tmp_path)
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


def test_digits_with_another_schedule(tmp_path):
    run_example(EXAMPLE, 2, *DIGITS, "--schedule", "2bw", "--out", tmp_path)
    results = results_in(tmp_path)
    assert results["losses"][0] > 0.5 + results["losses"][-1]
    assert 0.5 < results["accuracy"] < 1


def test_ctrl_c_ends_all_ranks(tmp_path):
    arguments = ["--steps", 100000, "--out", tmp_path]
    assert_ctrl_c_ends_all(EXAMPLE, 2, *arguments, shown=b"steps")
