"""The files for clusters, run on this machine: stand-ins start what Slurm and Kubernetes would."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_launch import SCRIPT

pytestmark = pytest.mark.slow  # starts processes that import torch
CLUSTERS = Path("examples/clusters").resolve()
TRAIN = """
import torch
import torch.distributed as dist
from pyparallel import SGP, GossipDataParallel, topology

dist.init_process_group("gloo")
module = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = GossipDataParallel(module, optimizer, SGP(topology.Ring(dist.get_world_size())))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {model.metrics()['rank/steps']:g}\\n",
      end="", flush=True)
dist.destroy_process_group()
"""
# Starts the tasks of a job as Slurm does: each has its number, and the status is the largest.
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    print("srun", words.pop(0), file=sys.stderr)
tasks = [
    subprocess.Popen(words, env=os.environ | {{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}})
    for n in range(int(os.environ["SLURM_NTASKS"]))
]
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
test "$*" = "show hostnames localhost,other" && printf 'localhost\\nother\\n'
"""


@pytest.fixture
def slurm(tmp_path):
    """Return a function that runs a batch script as Slurm does, with two tasks."""
    commands = {
        "srun": SRUN.format(python=sys.executable),
        "scontrol": SCONTROL,
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def run(script, *arguments):
        path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2"}
        job |= {"SLURM_JOB_NODELIST": "localhost,other", "PATH": path}
        return run_here(["bash", CLUSTERS / script, *arguments], tmp_path, job)

    return run


def environment(**others):
    return os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"} | others


def run_here(command, folder, variables):
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_slurm_starts_a_task_for_each_rank(slurm, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    found = slurm("slurm.sbatch", "train.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert sorted(found.stdout.splitlines()) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


def test_a_replica_of_slurm_that_is_killed_comes_back(slurm, tmp_path):
    pytest.importorskip("torchft")
    (tmp_path / "train.py").write_text(SCRIPT)
    found = slurm("slurm_elastic.sbatch", "train.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "srun --kill-on-bad-exit=0\nsrun --no-kill\n" in found.stderr
    assert (tmp_path / "stop").exists()  # written by the replica that torchrun has started again


def test_kubeflow_starts_a_torchrun_on_each_node(tmp_path):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((CLUSTERS / "kubernetes.yaml").read_text())
    trainer = job["spec"]["trainer"]
    assert trainer["command"][:2] == ["torchrun", "examples/language_model.py"]
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.create_server(("localhost", 0)) as server:  # a free port
        port = str(server.getsockname()[1])
    nodes = trainer["numNodes"]
    common = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1"}
    common |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "train.py"],
            cwd=tmp_path,
            env=environment(**common, PET_NODE_RANK=str(rank)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(nodes)
    ]
    printed = [each.communicate(timeout=150)[0] for each in started]
    assert sorted("".join(printed).splitlines()) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


def test_each_pod_of_kubernetes_is_a_replica(tmp_path):
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((CLUSTERS / "kubernetes_elastic.yaml").read_text())
    service, lighthouse, job = documents
    (port,) = service["spec"]["ports"]
    assert service["spec"]["selector"] == lighthouse["spec"]["template"]["metadata"]["labels"]
    (replica,) = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in replica["env"]}
    address = f"http://{service['metadata']['name']}:{port['port']}"
    assert variables["PYPARALLEL_LIGHTHOUSE"] == address
    assert variables["PYPARALLEL_REPLICAS"] == str(job["spec"]["completions"])
    shown = 'echo "$PYPARALLEL_REPLICA" "$@"'
    (tmp_path / "torchrun").write_text(f"#!/bin/sh\n{shown}\n")
    (tmp_path / "torchrun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = run_here(replica["command"], tmp_path, {"JOB_COMPLETION_INDEX": "3", "PATH": path})
    assert found.stdout.split()[0] == "replica-3"
    assert found.stdout.split()[-1] == "train.py"
