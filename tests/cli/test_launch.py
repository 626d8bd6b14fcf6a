"""``python -m pyparallel launch``: a lighthouse, and a torchrun for each replica."""

import os
import subprocess
import sys

import pytest

from pyparallel.__main__ import main

SCRIPT = """
import os, signal, time
import torch
from torch import nn
from pyparallel import SGP, GossipDataParallel
from pyparallel.gossip import Lighthouse

module = nn.Linear(4, 4)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
trainer = GossipDataParallel(module, optimizer, SGP(), membership=Lighthouse())
restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
while not os.path.exists("stop"):
    optimizer.zero_grad()
    trainer(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    if trainer.members == ("replica-0", "replica-1") and not restarted:
        if os.environ["PYPARALLEL_REPLICA"] == "replica-1":
            os.kill(os.getpid(), signal.SIGKILL)
    if restarted and len(trainer.members) == 2:
        open("stop", "w")
trainer.leave()
"""


@pytest.fixture
def call(monkeypatch, capsys):
    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["pyparallel", "launch", *arguments])
        main()
        return capsys.readouterr().out

    return run_here


def test_the_commands_for_several_machines(call):
    printed = call("--replicas", "3", "--print", "train.py", "--lr", "0.1")
    assert "torchft_lighthouse --min_replicas 1" in printed
    assert "PYPARALLEL_REPLICAS=3 PYPARALLEL_REPLICA=replica-0" in printed
    assert printed.endswith("--max-restarts 3 train.py --lr 0.1\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--replicas", "0", "train.py"], "--replicas must be at least 1, got 0"),
        ([], "a script must come last, got none"),
    ],
)
def test_wrong_arguments(call, arguments, text):
    with pytest.raises(SystemExit, match=text):
        call(*arguments)


@pytest.mark.slow
def test_a_replica_that_is_killed_comes_back(tmp_path):
    pytest.importorskip("torchft")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "pyparallel", "launch", "--replicas", "2", "train.py"]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout == "replica-0: exit status 0\nreplica-1: exit status 0\n"
