"""The README's gossip example, run and interrupted as by a user."""

import importlib
import json
import sys

import pytest
import torch

from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP, AllReduce
from tests.examples.as_user import assert_ctrl_c_ends_all, run_example
from tests.workers import run_ranks

EXAMPLE = "train_gossip.py"

pytestmark = pytest.mark.slow  # test_short_runs.py has a short run


def consensus_accuracy(output):
    line = next(line for line in output.splitlines() if "test accuracy, consensus" in line)
    return float(line.split()[-1].rstrip("%"))


def test_trains_prints_draws_and_saves(tmp_path, monkeypatch):
    result = run_example(EXAMPLE, 3, "--epochs", 12, "--out", tmp_path, "--slow-rank", "1:2")
    assert "epochs: 100%" in result.stderr
    assert consensus_accuracy(result.stdout) > 90
    for row in ("test accuracy, rank 2", "consensus distance", "seconds per step", "bytes sent"):
        assert row in result.stdout
    assert (tmp_path / "gossip.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.syspath_prepend("examples")
    bare = importlib.import_module("digits_net").build_net()
    bare.load_state_dict(torch.load(tmp_path / "gossip.pt", weights_only=True))


def test_learns_text(tmp_path):
    result = run_example(EXAMPLE, 2, "--data", "text", "--steps", 25, "--out", tmp_path)
    for row in ("consensus distance", "tokens (bytes) per second", "bytes sent", "held out"):
        assert row in result.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert f"held-out bits per byte, consensus  {results['score']:.3f}" in result.stdout
    assert len(results["scores_of_ranks"]) == 2
    assert max(results["score"], *results["scores_of_ranks"]) < 6  # of 8 before the first step
    assert results["num_steps"] == 25
    assert [len(each) for each in results["losses_of_ranks"]] == [25, 25]
    assert (tmp_path / "gossip.png").read_bytes().startswith(b"\x89PNG")
    weights = torch.load(tmp_path / "gossip.pt", weights_only=True)
    assert weights["0.bytes.weight"].shape[0] == 256


def test_one_rank_with_another_algorithm_or_topology(tmp_path):
    for arguments, steps in [
        (["--algorithm", "allreduce"], 95),  # an epoch has 90
        (["--topology", "ring"], 5),
    ]:
        result = run_example(EXAMPLE, 1, "--steps", steps, "--out", tmp_path, *arguments)
        assert "consensus distance            0\n" in result.stdout, arguments
        assert json.loads((tmp_path / "results.json").read_text())["num_steps"] == steps


def test_ctrl_c_ends_all_ranks(tmp_path):
    arguments = ["--epochs", 100000, "--out", tmp_path]
    assert_ctrl_c_ends_all(EXAMPLE, 4, *arguments, shown=b"epochs")


TOPOLOGIES = ["ring", "one-peer-exponential", "directed-exponential", "complete"]
SEEDS, EPOCHS = range(3), 12


def accuracies(rank):
    """Train with every topology and seed, and return the means of their accuracies in percent."""
    sys.path.insert(0, "examples")
    example, digits = (importlib.import_module(name) for name in ("train_gossip", "gossip_digits"))
    graphs = {name: example.TOPOLOGIES[name](4) for name in TOPOLOGIES}
    algorithms = {"exact": AllReduce()} | {name: SGP(graph) for name, graph in graphs.items()}

    def accuracy(algorithm, seed):
        torch.manual_seed(seed)
        task = digits.Digits(None, seed, epochs=EPOCHS)
        model, optimizer = task.build()
        model = GossipDataParallel(model, optimizer, algorithm)
        task.train(model, optimizer, lambda begin: None)
        with model.consensus() as averaged:
            return 100 * task.score(averaged)

    return {
        name: sum(accuracy(algorithm, seed) for seed in SEEDS) / len(SEEDS)
        for name, algorithm in algorithms.items()
    }


def test_every_topology_is_as_accurate_as_all_reduce():
    """Train for less time than the README's table, which benchmarks/gossip/compare.py makes."""
    found = run_ranks(4, accuracies, time_limit=300)[0]
    assert min(found.values()) >= 96, found
    assert max(abs(found[name] - found["exact"]) for name in TOPOLOGIES) <= 1, found
