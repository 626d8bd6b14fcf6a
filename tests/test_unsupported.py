"""What pyparallel cannot use is one sentence, and what serves instead runs."""

import subprocess
import sys
from pathlib import Path

import pytest

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
