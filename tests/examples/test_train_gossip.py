"""The README's gossip example, run and interrupted as by a user."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.interrupt import assert_ctrl_c_ends_all

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
EXAMPLE = "examples/train_gossip.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_example(num_ranks, *arguments):
    command = [*TORCHRUN, str(num_ranks), EXAMPLE, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def consensus_accuracy(output):
    line = next(line for line in output.splitlines() if "test accuracy, consensus" in line)
    return float(line.split()[-1].rstrip("%"))


def test_trains_prints_draws_and_saves(tmp_path):
    result = run_example(3, "--epochs", "12", "--out", str(tmp_path), "--slow-rank", "1:2")
    assert "epochs: 100%" in result.stderr
    assert consensus_accuracy(result.stdout) > 90
    for row in ("test accuracy, rank 2", "consensus distance", "seconds per step", "bytes sent"):
        assert row in result.stdout
    assert (tmp_path / "gossip.png").read_bytes().startswith(b"\x89PNG")
    bare = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )
    bare.load_state_dict(torch.load(tmp_path / "gossip.pt", weights_only=True))


def test_learns_text(tmp_path):
    result = run_example(2, "--data", "text", "--steps", "25", "--out", str(tmp_path))
    for row in ("consensus distance", "tokens (bytes) per second", "bytes sent", "held out"):
        assert row in result.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert f"held-out bits per byte, consensus  {results['score']:.3f}" in result.stdout
    assert len(results["scores_of_ranks"]) == 2
    assert max(results["score"], *results["scores_of_ranks"]) < 6  # of 8 before the first step
    assert (results["num_steps"], [len(each) for each in results["losses_of_ranks"]]) == (
        25,
        [25] * 2,
    )
    assert (tmp_path / "gossip.png").read_bytes().startswith(b"\x89PNG")
    weights = torch.load(tmp_path / "gossip.pt", weights_only=True)
    assert weights["0.bytes.weight"].shape[0] == 256


def test_the_text_does_not_depend_on_the_order_of_folders(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend("examples")
    find_files = importlib.import_module("standard_library").find_files
    names = ["b.py", "a/__init__.py", "a/x.py", "a/test/__init__.py", "a/tests/t.py", "no/x.py"]
    for name in [*names, "a/c/__init__.py", "a/data.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = ["a/__init__.py", "a/c/__init__.py", "a/x.py", "b.py"]
    iterdir = Path.iterdir
    for order in (sorted, lambda paths: sorted(paths, reverse=True)):
        monkeypatch.setattr(Path, "iterdir", lambda path, order=order: iter(order(iterdir(path))))
        assert [path.relative_to(tmp_path).as_posix() for path in find_files(tmp_path)] == expected


def test_steps_also_limit_the_digits(tmp_path):
    run_example(1, "--steps", "95", "--out", str(tmp_path))  # an epoch has 90
    assert json.loads((tmp_path / "results.json").read_text())["num_steps"] == 95


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "text", "--epochs", "3"], "limit text by --steps"),
        (["--steps", "0"], "must be a positive integer, got 0"),
    ],
)
def test_invalid_lengths_are_an_error(arguments, message):
    command = [sys.executable, EXAMPLE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("arguments", [["--algorithm", "allreduce"], ["--topology", "ring"]])
def test_other_algorithms_and_one_rank(tmp_path, arguments):
    result = run_example(1, "--epochs", "3", "--out", str(tmp_path), *arguments)
    assert "consensus distance            0\n" in result.stdout


@pytest.mark.parametrize("text", ["2", "a:3", "1:0.5", "-1:2"])
def test_an_invalid_slow_rank_is_an_error(text):
    command = [sys.executable, EXAMPLE, f"--slow-rank={text}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert f"got {text}" in result.stderr


def test_ctrl_c_ends_all_ranks(tmp_path):
    command = [*TORCHRUN, "4", EXAMPLE, "--epochs", "100000", "--out", str(tmp_path)]
    assert_ctrl_c_ends_all(command, ENVIRONMENT, shown=b"epochs")


TOPOLOGIES = ["ring", "one-peer-exponential", "directed-exponential", "complete"]


@pytest.mark.slow
def test_every_topology_is_as_accurate_as_all_reduce(tmp_path):
    """The README's table: means of three seeds, four ranks, the default budget."""

    def mean_accuracy(*arguments):
        runs = [
            run_example(4, "--seed", str(seed), "--out", str(tmp_path), *arguments)
            for seed in range(3)
        ]
        return sum(consensus_accuracy(run.stdout) for run in runs) / len(runs)

    exact = mean_accuracy("--algorithm", "allreduce")
    gossip = {name: mean_accuracy("--topology", name) for name in TOPOLOGIES}
    assert min(exact, *gossip.values()) >= 96, (exact, gossip)
    assert max(abs(accuracy - exact) for accuracy in gossip.values()) <= 1, (exact, gossip)
