"""Every Triton kernel, compiled: few registers, no spills, 16 bytes at a time.

The files beside list the launches of a kernel each.
"""

import fcntl
import json
import os
import subprocess
import sys
from itertools import cycle, product
from pathlib import Path

import pytest

from tests.kernels.every_kernel import KERNELS, compilations
from tests.kernels.inspect_triton import ARCHITECTURES, find_problems_of

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "3.6.0"  # which torch 2.11 pins


@pytest.mark.slow  # it compiles
def test_the_kernels_of_sgd_are_lean_and_move_16_bytes_at_a_time():
    turns = zip(compilations("test_sgd_step"), cycle(ARCHITECTURES), strict=False)
    assert find_problems_of(turns) == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_all_kernels_are_so_on_every_architecture(name):
    assert find_problems_of(product(compilations(name), ARCHITECTURES)) == []


@pytest.mark.slow
def test_so_they_are_with_the_oldest_triton():
    paths = [str(install(f"triton=={OLDEST}")), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.every_kernel", "sm_90"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    number = sum(len(compilations(name)) for name in KERNELS)
    expected = {"version": OLDEST, "number": number, "problems": []}
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def install(requirement: str) -> Path:
    """Download a package into a folder of the build; skip the test where no index is reached."""
    folder = ROOT / "build" / requirement
    folder.parent.mkdir(exist_ok=True)
    with folder.with_name(f"{requirement}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            incomplete = folder.with_name(f"{requirement}.incomplete")
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", requirement]
            command += ["--disable-pip-version-check", "--target", str(incomplete)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if "(from versions: none)" in done.stderr:
                pytest.skip(f"pip reaches no index that has {requirement}")
            assert done.returncode == 0, done.stderr
            incomplete.rename(folder)
    return folder
