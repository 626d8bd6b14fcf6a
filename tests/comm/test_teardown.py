"""Leaving: no thread of a gloo group may outlive it, however the script ends."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, weakref
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from pyparallel import GossipDataParallel, topology
from pyparallel.gossip import SGP, AllReduce, SlowMo

sys.setswitchinterval(5)  # workers rarely get Python's lock: what goes wrong goes wrong at once


def num_gloo_threads():
    tasks = Path("/proc/self/task").glob("*/comm")
    return sum(task.read_text().startswith("pt_gloo") for task in tasks)


def train(algorithm):
    model = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = GossipDataParallel(model, optimizer, algorithm)
    with model.join():
        for _ in range(3 + dist.get_rank()):
            model(torch.randn(2, 40)).sum().backward()
            optimizer.step()
    dist.all_reduce(torch.ones(10000))  # a temporary: its worker will drop the last reference
    return model


dist.init_process_group(*sys.argv[3:])
algorithm = {
    "sgp": SGP(topology.Ring(2)),
    "osgp": SlowMo(SGP(topology.Ring(2), overlap=1), interval=2),
    "allreduce": AllReduce(),
}[sys.argv[1]]
if sys.argv[2] == "forgets":
    model = train(algorithm)
elif sys.argv[2] == "keeps":
    model = train(algorithm)
    dist.destroy_process_group()
else:
    train(algorithm)
    dist.destroy_process_group()
    assert num_gloo_threads() == 0, f"{num_gloo_threads()} threads of gloo live on"
"""


@pytest.mark.parametrize("algorithm", ["sgp", "osgp", "allreduce"])
@pytest.mark.parametrize("ending", ["forgets", "keeps", "drops"])
@pytest.mark.parametrize("backend", [["gloo"], []], ids=["gloo", "default"])
def test_runs_end_with_zero(tmp_path, algorithm, ending, backend):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=2", str(script), algorithm, ending, *backend]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
