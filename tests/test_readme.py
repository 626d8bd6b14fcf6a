"""What the README says must work, as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.workers import run_ranks

README = Path("README.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
NUM_RANKS = 3


def run_scripts(rank, folder):
    """Run every script in this process; return the numbers of files that all ranks wrote."""
    counts = []
    for number, script in enumerate(SCRIPTS):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        os.chdir(place)
        with (
            mock.patch.object(dist, "init_process_group"),  # the group of the test serves
            mock.patch.object(dist, "destroy_process_group"),
        ):
            exec(compile(script, f"script {number} of README.md", "exec"), {"__name__": "__main__"})
        dist.barrier()
        counts.append(len(list(place.glob("*.pt"))))
    return counts


def test_every_script_trains_and_each_rank_saves_a_file(tmp_path):
    assert len(SCRIPTS) >= 5
    assert all("init_process_group" in script for script in SCRIPTS)
    for counts in run_ranks(NUM_RANKS, run_scripts, tmp_path):
        assert counts == [NUM_RANKS] * len(SCRIPTS)


@pytest.mark.slow  # the same scripts, started as a user does
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_the_script_runs_under_torchrun(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[number])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, f"--nproc-per-node={NUM_RANKS}", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(list(tmp_path.glob("*.pt"))) == NUM_RANKS


def test_the_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"train", "test", "check", "bench", "gpu"} <= named
    assert named <= targets


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert Path(target).exists(), target


def test_the_page_of_tests_names_tests_that_exist():
    folder = Path("tests")
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (folder / "README.md").read_text())
    assert len(named) > 40
    for path, name in named:
        assert f"def {name}(" in (folder / path).read_text() if name else (folder / path).exists()
