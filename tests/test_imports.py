"""What `import pyparallel` loads, refuses and warns of, in an interpreter of its own; its names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pyparallel
from pyparallel import compression, pipeline, subnets, topology

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import json, sys, warnings
import torch

version, found = torch.__version__, {}
torch.__version__ = torch.torch_version.TorchVersion("2.10.1")
try:
    import pyparallel
except ImportError as error:
    found["refusal"] = str(error)
torch.__version__ = version

torch.backends.cpu.get_cpu_capability = lambda: "DEFAULT"  # no AVX2
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pyparallel
late = ("torch.distributed.fsdp", "networkx", "matplotlib", "sympy")
late += tuple(f"pyparallel.{name}" for name in ("cli", "compression", "gossip", "pipeline"))
found["early"] = [name for name in late if name in sys.modules]
from pyparallel.ops import mix_
z, weight = torch.tensor([0.0, 1.0, 4.0]), torch.tensor(0.5, dtype=torch.float64)
mix_(z, weight, [torch.full((3,), 2.0)], torch.tensor([0.5], dtype=torch.float64))
found["mixed"] = z.tolist(), weight.item()
found["warnings"] = [str(each.message) for each in caught if each.category is RuntimeWarning]

from pyparallel.compression import fsdp_all_gather
pyparallel.topology.Ring(3).validate()
found["late"] = [name for name in ("torch.distributed.fsdp", "networkx") if name in sys.modules]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """Return what a new interpreter has found."""
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(
        command, cwd=ROOT, timeout=120, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(result.stdout)


def test_what_takes_long_to_import_is_imported_when_used(found):
    assert found["early"] == []
    assert found["late"] == ["torch.distributed.fsdp", "networkx"]


def test_an_old_torch_is_refused_with_what_to_install(found):
    assert found["refusal"] == (
        "pyparallel needs torch 2.11 or newer, got 2.10.1; pip install 'torch>=2.11'"
    )


@pytest.mark.skipif(
    not (ROOT / "pyparallel/_native/libpyparallel_cpu.so").exists(), reason="no library is built"
)
def test_a_processor_without_avx2_runs_plain_pytorch_with_a_warning(found):
    assert found["mixed"] == [[1.0, 1.5, 3.0], 1.0]  # averages of both
    (warning,) = found["warnings"]
    assert "CPU ops in plain PyTorch, which is slower" in warning
    assert "built for AVX2, which this processor lacks (torch reports DEFAULT)" in warning


def test_what_never_was_a_name_is_an_attribute_error():
    for module in (pyparallel, compression, pipeline, subnets, topology):
        with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
            module.Nonsense  # noqa: B018
