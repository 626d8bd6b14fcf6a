"""The compiled libraries use torch's stable ABI alone, from the oldest torch that is supported."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = sorted((ROOT / "pyparallel/_native").glob("libpyparallel_*.so"))
SYSTEM = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
TORCH = {"libtorch_cpu.so", "libtorch_cuda.so", "libc10.so"}


def oldest_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = [each for each in project["dependencies"] if each.startswith("torch")]
    return found.removeprefix("torch>=")


def needed_by(path):
    with path.open("rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        return {each.needed for each in dynamic.iter_tags("DT_NEEDED")}


@pytest.mark.skipif(not LIBRARIES, reason="no library is built")
def test_the_libraries_need_the_oldest_torch_and_the_system_alone():
    audit = Path(sys.executable).with_name("torch-abi-audit")
    for path in LIBRARIES:
        printed = subprocess.run([audit, "--json", path], check=True, capture_output=True).stdout
        (library,) = json.loads(printed)["bundled_libs"]
        found = library["torch"]
        assert found["stable"], path.name
        assert found["unstable_symbols"] == found["unknown_shim_symbols"] == []
        assert found["min_torch_version"].startswith(oldest_torch())
        assert needed_by(path) <= TORCH | SYSTEM  # neither OpenMP nor a CUDA runtime of its own


def test_the_oldest_torch_is_the_same_everywhere():
    code = (ROOT / "pyparallel/__init__.py").read_text()
    assert oldest_torch() == ".".join(re.search(r"__version__ < \((\d+), (\d+)\)", code).groups())
    hexadecimal = re.search(
        r"TORCH_TARGET_VERSION=0x(\w\w)(\w\w)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert oldest_torch() == ".".join(str(int(each, 16)) for each in hexadecimal.groups())
