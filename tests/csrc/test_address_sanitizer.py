"""The CPU kernels under AddressSanitizer: no message causes an access outside a buffer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # it compiles

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitized"


def run(command: list[str | Path], **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def libraries_of_sanitizer() -> str:
    """Return libraries to preload: the sanitizer, and libstdc++ for its exceptions."""
    names = ("libasan.so", "libstdc++.so")
    paths = [run(["c++", f"-print-file-name={name}"]).stdout.strip() for name in names]
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip("the C++ compiler has no AddressSanitizer")
    return " ".join(paths)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """Return a folder with the package, whose compiled library checks every access."""
    libraries_of_sanitizer()
    scripts = Path(sys.executable).parent
    configure = [
        scripts / "cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DPYPARALLEL_CUDA=OFF",
        f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}", f"-DPYTHON_EXECUTABLE={sys.executable}",
        # Little optimization: compile time dominates.
        "-DCMAKE_CXX_FLAGS=-fsanitize=address", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -g1",
    ]  # fmt: skip
    for command in (configure, [scripts / "cmake", "--build", BUILD, "--parallel"]):
        done = run(command)
        assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path_factory.mktemp("sanitized")
    ignored = shutil.ignore_patterns("_native", "__pycache__")
    shutil.copytree(ROOT / "pyparallel", folder / "pyparallel", ignore=ignored)
    (folder / "pyparallel" / "_native").mkdir()
    library = BUILD / "lib" / "libpyparallel_cpu.so"
    assert "__asan_report_store" in run(["nm", "--dynamic", library]).stdout
    shutil.copy(library, folder / "pyparallel" / "_native")
    return folder


def run_sanitized(package: Path, program: str) -> subprocess.CompletedProcess[str]:
    setting = {"LD_PRELOAD": libraries_of_sanitizer(), "ASAN_OPTIONS": "detect_leaks=0"}
    prelude = (
        "import torch\nfrom pyparallel import ops\n"
        "assert not ops.BACKENDS['cpu'][0].unavailable_reason\n"
    )
    command = [sys.executable, "-c", prelude + program]
    return run(command, cwd=package, env={**os.environ, **setting}, timeout=300)


PROGRAMS = sorted((Path(__file__).parent / "sanitized").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_no_access_is_outside_a_buffer(package, program):
    done = run_sanitized(package, program.read_text() + "\nprint('right')")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[:4000]


def test_an_access_outside_a_buffer_is_detected(package):
    # The compiled code gets a buffer of ten elements with a length of a thousand.
    lie = """
import ctypes
ten = torch.zeros(10)
array = (ctypes.c_float * 1000).from_address(ten.data_ptr())
from pyparallel.ops.top_k import top_k_unchecked
x = torch.frombuffer(array, dtype=torch.float32)
top_k_unchecked(x, None, None, torch.zeros(5), torch.zeros(5, dtype=torch.int32))
"""
    done = run_sanitized(package, lie)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
