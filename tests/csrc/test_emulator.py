"""The emulator that runs CUDA kernels on the CPU."""

import subprocess

import pytest
import torch

from tests.csrc.emulated import BUILD, build
from tests.ops import test_adamw_step, test_sgd_step
from tests.ops.parity import EMULATED_CUDA

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


def test_scalars_on_the_host_are_kernel_arguments(monkeypatch):
    monkeypatch.setenv("EMULATED_SCALARS_ON_HOST", "1")
    for found_inf in (None, 0.0, 1.0):
        around = {"num_messages": 0, "grad_scale": 4.0, "found_inf": found_inf, "counts": True}
        for step in (test_adamw_step, test_sgd_step):
            step.parity(EMULATED_CUDA, step.sample(1003, **around))
