"""What the README says must work, as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path("README.md").read_text()


SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    ("number", "files"),
    [
        (0, "model-*.pt"),
        (1, "stages-*.pt"),
        (2, "interlocked-*.pt"),
        (3, "subnets-*.pt"),
        (4, "compression-*.pt"),
    ],
)
def test_the_script_runs(tmp_path, number, files):
    block = SCRIPTS[number]
    script = tmp_path / "script.py"
    script.write_text(block)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*torchrun, "--nproc-per-node=3", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(list(tmp_path.glob(files))) == 3


def test_the_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"train", "test", "check", "bench", "gpu"} <= named
    assert named <= targets


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert Path(target).exists(), target
