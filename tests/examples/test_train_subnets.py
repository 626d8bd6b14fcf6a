"""The subnets example, run as a user would."""

import importlib
import json

import pytest
import torch

from tests.examples.as_user import run_example

EXAMPLE = "train_subnets.py"

pytestmark = pytest.mark.slow  # test_short_runs.py has a short run


def test_reads_digits_prints_draws_and_saves(tmp_path):
    result = run_example(EXAMPLE, 2, "--epochs", 3, "--out", tmp_path)
    assert "epochs: 100%" in result.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    for row in (
        f"test accuracy, all subnets together  {results['score']:.2%}",
        "weights of the full model            284,490",
        f"weights of subnet 1                  {results['weights_of_subnets'][1]:,}",
        "steps per rank                       135",  # 719 digits in batches of 16, or 718
        "merges                               8",  # every 20 steps, and before scores
        "bytes sent per step and rank",
    ):
        assert row in result.stdout
    assert results["score"] > 0.9
    assert [step for step, _ in results["scores"]] == [90, 135]
    assert results["scores"][-1][1] == results["score"]
    assert (tmp_path / "subnets.png").read_bytes().startswith(b"\x89PNG")
    weights = torch.load(tmp_path / "subnets.pt", weights_only=True)
    assert weights["3.weight"].shape == (64, 32, 3, 3)
    assert not any(tensor.isnan().any() for tensor in weights.values())


def test_learns_text(tmp_path, monkeypatch):
    small = ["--steps", "30", "--interval", "7", "--optimizer-state", "reset"]
    result = run_example(EXAMPLE, 2, "--data", "text", *small, "--out", tmp_path)
    for row in ("all subnets together", "tokens (bytes) per second", "held out"):
        assert row in result.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] < 6  # of 8 before the first step
    assert [len(losses) for losses in results["losses_of_ranks"]] == [30, 30]
    monkeypatch.syspath_prepend("examples")
    bare = importlib.import_module("byte_transformer").build_transformer(128, 64, 2, 8)
    bare.load_state_dict(torch.load(tmp_path / "subnets.pt", weights_only=True))
