"""The emulator that runs CUDA kernels on the CPU."""

import subprocess

import pytest
import torch

from tests.csrc.emulated import BUILD, build

if torch.cuda.is_available():
    pytest.skip("with a GPU its own library serves", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build()


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [BUILD / "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_intrinsics_behave_as_in_cuda():
    done = check()
    assert (done.returncode, done.stdout) == (0, "right\n")


def test_a_barrier_not_reached_by_all_threads_is_reported():
    done = check("stuck")
    assert done.returncode != 0
    assert "wait at a barrier that others never reach" in done.stderr
