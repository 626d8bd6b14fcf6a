"""The emulator that runs CUDA kernels on the CPU."""

import subprocess
from itertools import product

import pytest
import torch

from pyparallel.ops.mix import mix_reference
from tests.csrc.emulated import BUILD, build
from tests.ops import test_adamw_step, test_sgd_step
from tests.ops.parity import EMULATED_CUDA

if torch.cuda.is_available():
    pytest.skip("with a GPU its own library serves", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build()


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [BUILD / program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_intrinsics_behave_as_in_cuda():
    done = run("check")
    assert (done.returncode, done.stdout) == (0, "right\n")


def test_a_barrier_not_reached_by_all_threads_is_reported():
    done = run("check", "stuck")
    assert done.returncode != 0
    assert "wait at a barrier that others never reach" in done.stderr


def test_scalars_on_the_host_are_kernel_arguments(monkeypatch):
    monkeypatch.setenv("EMULATED_SCALARS_ON_HOST", "1")
    # With messages a kernel makes the step's numbers, of which the powers come from the host.
    for found_inf, num_messages in product((None, 0.0, 1.0), (0, 3)):
        around = {"num_messages": num_messages, "grad_scale": 4.0, "found_inf": found_inf}
        around["counts"] = True
        for step in (test_adamw_step, test_sgd_step):
            step.parity(EMULATED_CUDA, step.sample(1003, **around))


def test_more_weights_than_have_counters_of_their_readers(monkeypatch):
    weights = [torch.tensor(1.0 + i, dtype=torch.float64) for i in range(9)]
    expected = [weight.clone() for weight in weights]
    masses = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    for turn in range(3):
        if turn == 0:  # then no further weight gets one
            monkeypatch.setenv("EMULATED_NO_WEIGHTS", "1")
        else:
            monkeypatch.delenv("EMULATED_NO_WEIGHTS", raising=False)
        for own, reference in zip(weights, expected, strict=True):
            z = torch.arange(5000.0)  # two blocks
            copy, messages = z.clone(), [z + 1 + turn] * 3
            EMULATED_CUDA.find("mix_")(z, own, messages, masses)
            mix_reference(copy, reference, messages, masses)
            torch.testing.assert_close(z, copy)
    assert weights == expected
