"""The compiled libraries without a GPU: the CUDA kernels' machine code, and what both link to."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import pyparallel
from tests.kernels.inspect_triton import ARCHITECTURES, MachineCode, find_waste, read_machine_code

NATIVE = Path(pyparallel.__file__).parent / "_native"
LIBRARIES = ["cpu", "cuda"]
# They walk no buffer, so 16-byte accesses are not asked of them.
ONE_THREAD = {"add_masses_kernel", "scalars_kernel"}
# An entry of a sparse message is one thread's work, wherever it lies.
ENTRY_WISE = {"draw_runs_kernel", "expand_runs_kernel", "find_entries_kernel", "gather_kernel"}
NEWEST_GLIBC = (2, 34)


def find_library(name: str) -> Path:
    if name == "cuda" and shutil.which("nvcc") is None:
        pytest.skip("nvcc is not found: there is no CUDA library to inspect")
    path = NATIVE / f"libpyparallel_{name}.so"
    assert path.exists(), f"{path.name} is missing: `make test` builds it"
    return path


@pytest.fixture(scope="module")
def kernels() -> list[MachineCode]:
    return read_machine_code(find_library("cuda"))


def short_name(code: MachineCode) -> str:
    """mix_kernel, from the mangled name of an instance of its template."""
    demangled = run("c++filt", code.name)
    match = re.search(r"(\w+_kernel)\b", demangled)
    assert match, f"a kernel is named <what>_kernel, got {demangled}"
    return match[1]


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_architecture_has_every_kernel(kernels):
    names = {name: [] for name in ARCHITECTURES}
    for code in kernels:
        names[code.architecture].append(code.name)
    assert all(sorted(found) == sorted(names["sm_80"]) for found in names.values())


def test_no_kernel_wastes_registers_or_spills(kernels):
    problems = [(code.architecture, code.name, find_waste(code)) for code in kernels]
    assert [problem for problem in problems if problem[2]] == []


def test_every_element_kernel_moves_16_bytes_at_a_time(kernels):
    walkers = [code for code in kernels if short_name(code) not in ONE_THREAD | ENTRY_WISE]
    assert {short_name(code) for code in walkers} >= {"mix_kernel"}
    narrow = [c for c in walkers if c.wide_load_bytes == 0 or c.wide_store_bytes == 0]
    assert narrow == []


def test_the_exceptions_exist(kernels):
    assert {short_name(code) for code in kernels} >= ONE_THREAD | ENTRY_WISE


@pytest.mark.parametrize("name", LIBRARIES)
def test_no_symbol_of_python_is_needed(name):
    undefined = run("nm", "--dynamic", "--undefined-only", find_library(name)).split()
    assert any(symbol.startswith("aoti_torch_") for symbol in undefined)
    assert [symbol for symbol in undefined if re.match(r"_?Py", symbol)] == []


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_c_library_may_be_old(name):
    needed = re.findall(r"@GLIBC_([\d.]+)", run("nm", "--dynamic", find_library(name)))
    versions = {tuple(map(int, version.split("."))) for version in needed}
    assert versions
    assert max(versions) <= NEWEST_GLIBC


@pytest.mark.parametrize("name", LIBRARIES)
def test_it_needs_torch_by_name_and_no_cuda_runtime(name):
    dynamic = run("readelf", "--dynamic", find_library(name))
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    torch = {"libtorch_cpu.so", "libc10.so"} | ({"libtorch_cuda.so"} if name == "cuda" else set())
    assert torch <= set(needed)
    assert [library for library in needed if library.startswith("libcudart")] == []
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
