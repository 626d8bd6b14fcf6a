"""Teardown: no thread of a gloo group outlives it, however the script ends."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts interpreters
SCRIPT = """
import os, sys, weakref
from contextlib import suppress
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from pyparallel import GossipDataParallel, topology
from pyparallel.gossip import SGP, AllReduce, SlowMo

sys.setswitchinterval(1)  # workers rarely get the GIL, so errors show at once


def num_gloo_threads():
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append(task.read_text())
    return sum(name.startswith("pt_gloo") for name in names)


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


dist.init_process_group(
    *sys.argv[3:],
    init_method=os.environ.get("INIT_METHOD", "env://"),
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
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


ALGORITHMS = ["sgp", "osgp", "allreduce"]
ENDINGS = ["forgets", "keeps", "drops"]
BACKENDS = {"gloo": ["gloo"], "default": []}
RUNS = list(product(ALGORITHMS, ENDINGS, BACKENDS))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def find_failures(script, runs):
    """Run all in parallel, forked from one process; return the logs of those that fail."""
    program = Path(__file__).with_name("interpreters.py")
    arguments = [[algorithm, ending, *BACKENDS[backend]] for algorithm, ending, backend in runs]
    command = [sys.executable, program, script, script.parent, json.dumps(arguments)]
    done = subprocess.run(command, check=False, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0
    failures = {}
    for index, run in enumerate(runs):
        folder = script.parent / str(index)
        statuses = json.loads((folder / "statuses").read_text())
        if statuses != [0, 0]:
            logs = "\n".join(path.read_text() for path in folder.glob("log-*"))
            failures["-".join(run)] = f"{statuses}\n{logs}"
    return failures


def test_runs_end_with_zero(script):
    assert find_failures(script, RUNS) == {}


@pytest.mark.parametrize("ending", ENDINGS)
def test_runs_of_torchrun_end_with_zero(script, ending):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=2", str(script), "osgp", ending]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stdout + result.stderr
