"""The README's examples on two ranks with a few steps: what they print, draw and save."""

import contextlib
import importlib
import io
import json
import re
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.workers import run_ranks

RUNS = {
    # Two ranks have 45 batches each per epoch; the steps end in the second one.
    "train_gossip": ["--steps", "47", "--slow-rank", "1:1.5"],
    "train_pipeline": [
        *["--width", "16", "--blocks", "2", "--batch-size", "8", "--steps", "24"],
        *["--schedule", "interlocking"],
    ],
    "train_subnets": ["--steps", "12", "--interval", "5"],
}


def run_all(rank, folder):
    """Run every example in this process; return what it printed, columns two spaces apart."""
    sys.path.insert(0, "examples")
    torch.set_num_threads(1)
    printed = {}
    for name, arguments in RUNS.items():
        argv = [f"{name}.py", *arguments, "--out", str(folder / name)]
        shown = io.StringIO()
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(dist, "init_process_group"),  # the group of the test serves
            mock.patch.object(dist, "destroy_process_group"),
            contextlib.redirect_stdout(shown),
        ):
            importlib.import_module(name).main()
        printed[name] = re.sub(r" {2,}", "  ", shown.getvalue())
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def printed(folder):
    first, second = run_ranks(2, run_all, folder)
    assert set(second.values()) == {""}  # only rank 0 prints
    return first


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def test_gossip(printed, folder, monkeypatch):
    out, results = folder / "train_gossip", results_of(folder / "train_gossip")
    for row in (
        f"test accuracy, consensus  {results['score']:.2%}",
        "test accuracy, rank 1",
        "consensus distance",
        "steps per rank  47",
        "seconds per step",
        "bytes sent",
    ):
        assert row in printed["train_gossip"]
    assert (results["num_ranks"], results["num_steps"]) == (2, 47)
    assert [len(losses) for losses in results["losses_of_ranks"]] == [47, 47]
    assert all(losses[0] > losses[-1] for losses in results["losses_of_ranks"])
    assert 0 < results["consensus_distance"] < 0.1
    assert (out / "gossip.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.syspath_prepend("examples")
    bare = importlib.import_module("digits_net").build_net()
    bare.load_state_dict(torch.load(out / "gossip.pt", weights_only=True))


def test_pipeline(printed, folder, monkeypatch):
    out, results = folder / "train_pipeline", results_of(folder / "train_pipeline")
    for row in (
        f"held-out bits per byte  {results['held_out']:.3f}",
        f"bubble, measured  {results['bubble']:.1%}",
        f"bubble, simulated  {results['bubble_simulated']:.1%}",
        "peak memory, rank 1",
        "24 updates",
    ):
        assert row in printed["train_pipeline"]
    assert "Interlocking(window=2, heads=LinearHead(num_outputs=256" in results["schedule"]
    (of_head,) = results["losses_of_heads"]
    for losses in (of_head, results["losses"]):
        assert len(losses) == 24
        assert losses[0] > losses[-1]
    assert 0 < results["held_out"] < 8
    assert 0 < results["bubble"] < 1
    assert 0 <= results["bubble_simulated"] < 1
    header, first, last = table_of_stages(printed["train_pipeline"])
    assert not {"staleness", "horizon"} & set(header)  # no weights are stale
    assert {"head", "held"} <= set(header)
    shown = [f"{sum(losses[22:]) / 2:.3f}" for losses in (of_head, results["losses"])]
    assert [first[-1], last[-1]] == shown
    assert last[header.index("head")] == "-"
    assert (out / "pipeline.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.syspath_prepend("examples")
    bare = importlib.import_module("byte_transformer").build_transformer(128, 16, 2, 4)
    parts = [torch.load(out / f"stage-{stage}.pt", weights_only=True) for stage in (0, 1)]
    bare.load_state_dict(parts[0] | parts[1])


def table_of_stages(output):
    """Return the cells of the table's lines."""
    lines = output.replace(" .. ", "..").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("stage "))
    return [line.split() for line in lines[begin : begin + 3]]


def test_the_last_tenth_of_few_steps_is_one(monkeypatch):
    monkeypatch.syspath_prepend("examples")
    mean_of_tenth = importlib.import_module("pipeline_report").mean_of_tenth
    assert mean_of_tenth([3.0, 2.0]) == 2
    assert mean_of_tenth([*range(29)]) == 27.5


def test_subnets(printed, folder):
    out, results = folder / "train_subnets", results_of(folder / "train_subnets")
    for row in (
        f"test accuracy, all subnets together  {results['score']:.2%}",
        "weights of the full model  284,490",
        f"weights of subnet 1  {results['weights_of_subnets'][1]:,}",
        "steps per rank  12",
        "merges  3",  # every 5 steps, and before the score
        "bytes sent per step and rank",
    ):
        assert row in printed["train_subnets"]
    assert results["scores"] == [[12, results["score"]]]
    assert (out / "subnets.png").read_bytes().startswith(b"\x89PNG")
    weights = torch.load(out / "subnets.pt", weights_only=True)
    assert weights["3.weight"].shape == (64, 32, 3, 3)
    assert not any(tensor.isnan().any() for tensor in weights.values())
