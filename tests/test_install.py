"""Installing from the sdist and from wheels, with different compilers available."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow  # it builds

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCES = (".git", ".venv*", ".*cache*", ".hypothesis", "__pycache__", "*.egg-info", "build")
NOT_SOURCES += ("dist", "runs", "_build", "_native", "*.log")
BUILD = f"build/native-{sysconfig.get_platform()}"
EVENT_LOOP = f"simulate{sysconfig.get_config_var('EXT_SUFFIX')}"
HAS_CUDA = torch.version.cuda is not None
# Without optimization it compiles in half the time.
UNOPTIMIZED = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"
# As some compilers do by themselves.
STATIC_LIBSTDCXX = "-DCMAKE_SHARED_LINKER_FLAGS=-static-libstdc++"

EXAMINE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import pyparallel
    from pyparallel.ops import mix_
z, weight = torch.tensor([0.0, 1.0, 4.0]), torch.tensor(0.5, dtype=torch.float64)
mix_(z, weight, [torch.full((3,), 2.0)], torch.tensor([0.5], dtype=torch.float64))
print(json.dumps({
    "file": pyparallel.__file__,
    "warnings": [str(w.message) for w in caught if "pyparallel" in str(w.message)],
    "z": z.tolist(),
    "weight": weight.item(),
}))
"""

MISTAKE = """
import torch
from pyparallel import ops
try:
    torch.ops.pyparallel.add_or_clear_(torch.zeros(4), torch.zeros(3), 1.0, None)
except RuntimeError as error:
    print(error)
"""


def run(command, *, folder, path=None, **variables) -> str:
    """Run with the compilers on `path` only, without this shell's settings."""
    settings = {"CC", "CXX", "CUDACXX", "CMAKE_ARGS", "PYPARALLEL_CUDA", "PYTHONPATH"}
    environment = {key: value for key, value in os.environ.items() if key not in settings}
    environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    if path is not None:
        environment["PATH"] = str(path)
    process = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(process.stdout)
    return process.stdout


def make_path(folder: Path, tools: list[str]) -> Path:
    """Return a folder for PATH with only these tools."""
    folder.mkdir()
    for tool in tools:
        found = shutil.which(tool)
        assert found, f"{tool} is not on PATH"
        (folder / tool).symlink_to(found)
    return folder


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return the sources as in a fresh clone."""
    folder = tmp_path_factory.mktemp("clone") / "source"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    return folder


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    work = folder / "work"
    shutil.copytree(source, work)
    leave_stale_libraries(work)
    backend = "from setuptools import build_meta; build_meta.build_sdist('..')"
    run(["-c", backend], folder=work)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def unpacked(sdist) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent / "unpacked", filter="data")
    (folder,) = (sdist.parent / "unpacked").iterdir()
    return folder


def leave_stale_libraries(folder: Path) -> None:
    """Create the files that an editable install leaves in the sources, with a build's names."""
    for place in ["pyparallel/_native", f"{BUILD}/lib"]:
        (folder / place).mkdir(parents=True)
        for name in ["cpu", "cuda"]:
            (folder / place / f"libpyparallel_{name}.so").write_text("stale")


@dataclass
class Installed:
    """A wheel, and the folder where it is installed."""

    wheel: Path
    folder: Path

    def names(self) -> set[str]:
        return set(zipfile.ZipFile(self.wheel).namelist())

    def libraries(self) -> set[str]:
        return {Path(name).name for name in self.names() if name.endswith(".so")}

    def doctor(self) -> str:
        command = ["-W", "ignore", "-m", "pyparallel", "doctor"]
        return run(command, folder="/", PYTHONPATH=str(self.folder))

    def examine(self) -> dict:
        """Import it from another folder and mix; return its warnings and the result."""
        return json.loads(run(["-c", EXAMINE], folder="/", PYTHONPATH=str(self.folder)))

    def train(self) -> str:
        """Train by gossip, by a hook and in a pipeline on two ranks, from another folder."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        return run([*launch, ROOT / "tests/smoke.py"], folder="/", **environment)


def build_and_install(source: Path, folder: Path, **environment) -> Installed:
    wheels, target = folder / "wheels", folder / "target"
    quickly = ["--quiet", "--no-deps"]
    build = ["-m", "pip", "wheel", *quickly, "--no-build-isolation", "--wheel-dir", wheels, source]
    run(build, folder="/", **environment)
    (wheel,) = wheels.iterdir()
    run(["-m", "pip", "install", *quickly, "--target", target, wheel], folder="/")
    return Installed(wheel, target)


def assert_mixes(report: dict, installed: Installed) -> None:
    assert "pyparallel/kernels/mix.py" in installed.names()
    assert Path(report["file"]).is_relative_to(installed.folder)
    assert report["z"] == [1.0, 1.5, 3.0]
    assert report["weight"] == 1.0


def test_the_sdist_contains_all_sources_and_nothing_built(source, unpacked):
    missing = files_below(source) - files_below(unpacked)
    assert {name for name in missing if not name.startswith(".")} == set()
    built = {name for name in files_below(unpacked) if "_native" in name or name.endswith(".so")}
    assert built == set()


def assert_is_for_this_platform(wheel: Path) -> None:
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none")
    assert platform.startswith("linux_")


def test_without_a_compiler(unpacked, tmp_path):
    # Built in a tree with the libraries of another build, which must not be packaged.
    work = tmp_path / "work"
    shutil.copytree(unpacked, work)
    leave_stale_libraries(work)
    path = make_path(tmp_path / "bin", [])
    installed = build_and_install(work, tmp_path, path=path)
    assert (work / BUILD / "build.json").exists()
    assert installed.wheel.name.endswith("-py3-none-any.whl")
    assert installed.libraries() == set()
    report = installed.doctor()
    assert "  compiled C++         missing [1]\n" in report
    assert "  [1] not built: no C++ compiler found\n" in report
    assert re.search(r"^  mix_ +PyTorch \[1\] +PyTorch \[1\] \[2\]$", report, re.MULTILINE)
    examined = installed.examine()
    assert_mixes(examined, installed)
    (warning,) = examined["warnings"]
    assert "CPU ops in plain PyTorch, which is slower" in warning
    assert "not built: no C++ compiler found" in warning


def test_the_sdist_installs_the_whole_package_and_nothing_else(source, sdist, tmp_path):
    path, target = make_path(tmp_path / "bin", []), tmp_path / "target"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    run([*install, "--no-build-isolation", "--target", target, sdist], folder="/", path=path)
    (facts,) = target.glob("*.dist-info/WHEEL")
    assert "\nTag: py3-none-any\n" in facts.read_text()
    package = {name for name in files_below(source) if name.startswith("pyparallel/")}
    kernels = {
        name.replace("kernels/triton/", "pyparallel/kernels/")
        for name in files_below(source)
        if name.startswith("kernels/")
    }
    installed = {name for name in files_below(target) if ".dist-info/" not in name}
    assert "pyparallel/kernels/mix.py" in kernels
    assert installed == package | kernels | {"pyparallel/_native/build.json"}


def test_with_a_cpp_compiler_only(sdist, tmp_path):
    path = make_path(tmp_path / "bin", ["c++", "as", "ld"])
    options = f"{UNOPTIMIZED} {STATIC_LIBSTDCXX}"
    installed = build_and_install(sdist, tmp_path, path=path, CMAKE_ARGS=options)
    assert_is_for_this_platform(installed.wheel)
    assert installed.libraries() == {"libpyparallel_cpu.so", EVENT_LOOP}
    report = installed.doctor()
    assert f"  compiled event loop  {EVENT_LOOP}\n" in report
    assert "  compiled C++         libpyparallel_cpu.so\n" in report
    assert re.search(r"^  mix_ +compiled C\+\+ ", report, re.MULTILINE)
    why = "nvcc not found" if HAS_CUDA else "this torch has no CUDA"
    assert f"not built: {why}\n" in report
    examined = installed.examine()
    assert_mixes(examined, installed)
    assert examined["warnings"] == []
    printed = run(["-c", MISTAKE], folder="/", PYTHONPATH=str(installed.folder))
    assert re.search(r"tensor_checks\.h:\d+, y: expected the length", printed), printed
    assert re.findall("^(gossip|hook|pipeline): loss", installed.train(), re.MULTILINE) == [
        "gossip",
        "hook",
        "pipeline",
    ]


def test_with_nvcc(tmp_path):
    built = ROOT / BUILD / "build.json"
    if not built.exists() or "built with nvcc" not in built.read_text():
        pytest.skip("the CUDA library is not built: make test-slow builds it where nvcc is found")
    installed = build_and_install(ROOT, tmp_path, PYPARALLEL_CUDA="ON")  # what is built serves
    assert_is_for_this_platform(installed.wheel)
    assert installed.libraries() == {"libpyparallel_cpu.so", "libpyparallel_cuda.so", EVENT_LOOP}
    outcomes = json.loads((installed.folder / "pyparallel/_native/build.json").read_text())
    assert outcomes["cuda"].startswith("built with nvcc")
    report = installed.doctor()
    assert re.search(r"^  mix_ +compiled C\+\+ ", report, re.MULTILINE)
    if not HAS_CUDA:
        assert "built, but not loaded: this torch has no CUDA" in report
    examined = installed.examine()
    assert_mixes(examined, installed)
    assert examined["warnings"] == []


def copy(unpacked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unpacked, tmp_path / "work"))


CARDS = {
    "7.5": "not built: the GPUs here have compute capability 7.5, where the kernels need 8.0",
    "9.9": "not built: the GPUs here have compute capability 9.9, where the kernels need 8.0",
    "7.5\\n8.6\\n8.6\\n9.0": "built with nvcc {} for 86-real 90-real",
    "": "built with nvcc {} for 80-real 90-real 100 120-real",
}


def test_the_kernels_are_for_the_cards_present_and_nvcc_may_be_of_pypi(source, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not found")
    path = make_path(tmp_path / "bin", ["c++", "g++", "gcc", "as", "ld", "sh"])
    write_script(tmp_path / "site/nvidia/cu13/bin/nvcc", f'exec {nvcc} "$@"')
    options = ["-DPYPARALLEL_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native", "-G", "Ninja"]
    ninja = Path(sysconfig.get_path("scripts"), "ninja")
    options += [f"-DPYTHON_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    for cards, outcome in CARDS.items():
        write_script(path / "nvidia-smi", f"printf '{cards}'")
        configure = ["-m", "cmake", "-S", source, "-B", tmp_path / "build", *options]
        run(configure, folder="/", path=path, PYTHONPATH=str(tmp_path / "site"))
        found = json.loads((tmp_path / "build/build.json").read_text())["cuda"]
        version = re.findall(r"nvcc ([\d.]+)", found)
        assert found.startswith(outcome.format(*version))


def write_script(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_requesting_cuda_without_nvcc_is_refused(unpacked, tmp_path):
    path = make_path(tmp_path / "bin", ["c++", "as", "ld"])
    command = ["setup.py", "build_native"]
    with pytest.raises(RuntimeError, match="PYPARALLEL_CUDA=ON must have nvcc on PATH"):
        run(command, folder=copy(unpacked, tmp_path), path=path, PYPARALLEL_CUDA="ON")


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        ("sys.modules['torch'] = None", "torch is not importable in the build (use --no-build-"),
        ("sysconfig.get_path = lambda _: '/nowhere'", "cmake not found (pip install cmake ninja)"),
    ],
)
def test_a_build_without_torch_or_cmake_is_pure_python_and_reports_it(
    unpacked, tmp_path, hidden, reason
):
    # An isolated build fetches cmake but not torch; this one hides them without a network.
    work, path = copy(unpacked, tmp_path), make_path(tmp_path / "bin", [])
    build = (
        f"import runpy, sys, sysconfig; sys.argv[1:] = ['build', '--build-lib', 'out']; {hidden}"
    )
    build += "; runpy.run_path('setup.py', run_name='__main__')"
    printed = run(["-c", build], folder=work, path=path)
    outcomes = json.loads((work / "out/pyparallel/_native/build.json").read_text())
    assert outcomes.keys() == {"cpu", "cuda", "simulate"}
    for name, outcome in outcomes.items():
        assert outcome.startswith(f"not built: {reason}")
        assert f"pyparallel: {name} library {outcome}" in printed
    assert list(work.glob("out/**/*.so")) == []
    assert (work / "out/pyparallel/kernels/mix.py").exists()


IMPORT_KERNELS = """
import importlib, sys
sys.path[:0] = {paths}
import kernels
print(kernels.__file__)
print(importlib.import_module("pyparallel.kernels").__file__)
"""


def test_a_checkout_on_the_path_does_not_hide_the_package_kernels(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").touch()
    program = IMPORT_KERNELS.format(paths=[str(ROOT), str(tmp_path)])
    theirs, ours = run(["-c", program], folder="/").split()
    assert theirs == str(tmp_path / "kernels/__init__.py")
    assert ours == str(ROOT / "kernels/triton/__init__.py")  # this install is editable
