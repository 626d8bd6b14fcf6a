"""The README's main job: run as a user runs it, and interrupted as a user interrupts it."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

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


@pytest.mark.parametrize("arguments", [["--algorithm", "allreduce"], ["--topology", "ring"]])
def test_other_algorithms_and_one_rank(tmp_path, arguments):
    result = run_example(1, "--epochs", "3", "--out", str(tmp_path), *arguments)
    assert "consensus distance            0\n" in result.stdout


@pytest.mark.parametrize("text", ["2", "a:3", "1:0.5", "-1:2"])
def test_a_bad_slow_rank_is_refused(text):
    command = [sys.executable, EXAMPLE, f"--slow-rank={text}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert f"got {text}" in result.stderr


def test_ctrl_c_ends_all_ranks(tmp_path):
    command = [*TORCHRUN, "4", EXAMPLE, "--epochs", "100000", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip
    while b"epochs" not in process.stderr.readline(200):
        assert process.poll() is None
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=40)
    assert time.monotonic() - begin < 35
    assert process.returncode != 0
    assert b"terminate called" not in errors
    with pytest.raises(ProcessLookupError):  # no rank is left behind
        os.killpg(process.pid, 0)


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
