"""What pyparallel cannot use is one sentence, and what serves instead runs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyparallel.ops import _library

ROOT = Path(__file__).resolve().parent.parent
OLD_TORCH = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.10.1")
import pyparallel
"""
NO_AVX2 = """
import torch
torch.backends.cpu.get_cpu_capability = lambda: "DEFAULT"
from pyparallel.ops import mix_
z, weight = torch.tensor([0.0, 1.0, 4.0]), torch.tensor(0.5, dtype=torch.float64)
mix_(z, weight, [torch.full((3,), 2.0)], torch.tensor([0.5], dtype=torch.float64))
print(z.tolist(), weight.item())
"""


def run(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_old_torch_is_refused_with_what_to_install():
    result = run(OLD_TORCH)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last == (
        "ImportError: pyparallel needs torch 2.11 or newer, got 2.10.1; pip install 'torch>=2.11'"
    )


@pytest.mark.skipif(
    not (ROOT / "pyparallel/_native/libpyparallel_cpu.so").exists(), reason="no library is built"
)
def test_a_processor_without_avx2_runs_plain_pytorch_with_a_warning():
    result = run(NO_AVX2)
    assert result.stdout == "[1.0, 1.5, 3.0] 1.0\n"  # averages of both
    (warning,) = [line for line in result.stderr.splitlines() if "RuntimeWarning" in line]
    assert "CPU ops in plain PyTorch, which is slower" in warning
    assert "built for AVX2, which this processor lacks (torch reports DEFAULT)" in warning


def test_the_version_of_a_driver_is_read_where_there_is_one():
    assert (_library._driver_version() >= 12000) == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("cuda", "driver", "reason"),
    [
        (None, 0, "built, but not loaded: this torch has no CUDA"),
        ("12.8", 12080, "built with CUDA 13, which this driver for CUDA 12.8 cannot run: update "
         "the driver"),
        ("12.8", 13000, None),  # the library has a CUDA runtime of its own
        ("13.2", 0, None),  # no driver and no GPU
    ],
)  # fmt: skip
def test_a_cuda_library_that_cannot_run_is_not_loaded(monkeypatch, tmp_path, cuda, driver, reason):
    (tmp_path / "libpyparallel_cuda.so").touch()
    (tmp_path / "build.json").write_text('{"cuda": "built with nvcc 13.0.88 for 80-real"}')
    monkeypatch.setattr(_library, "_NATIVE_FOLDER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(_library, "_driver_version", lambda: driver)
    found = _library.load_native("cuda").unavailable_reason
    # A library that is tried is none: it has no bytes.
    assert found == reason or (reason is None and "it does not load" in found)
