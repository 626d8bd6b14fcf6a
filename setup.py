"""Hands the native build over to CMakeLists.txt and maps kernels/triton/ to pyparallel.kernels.

What CMake could not build is written to pyparallel/_native/build.json, which
`python -m pyparallel doctor` prints: an install without a compiler works, and says what it lacks.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
FILES = {
    "cpu": "libpyparallel_cpu.so",
    "cuda": "libpyparallel_cuda.so",
    "simulate": f"simulate{sysconfig.get_config_var('EXT_SUFFIX')}",
}


def find_tool(name: str) -> str | None:
    """The tool of this environment first: pip does not put its scripts on PATH."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which(name, path=os.pathsep.join([scripts, os.environ.get("PATH", "")]))


def was_moved(build_dir: Path) -> bool:
    """CMake refuses a build folder that came along when its tree was copied or moved."""
    cache = build_dir / "CMakeCache.txt"
    return cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text()


def run_cmake(build_dir: Path) -> None:
    cmake, ninja = find_tool("cmake"), find_tool("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DPYTHON_EXECUTABLE={sys.executable}",
        f"-DPYPARALLEL_CUDA={os.environ.get('PYPARALLEL_CUDA', 'AUTO')}",
        *shlex.split(os.environ.get("CMAKE_ARGS", "")),
    ]
    if was_moved(build_dir):
        shutil.rmtree(build_dir)
    subprocess.run([cmake, "-S", ROOT, "-B", build_dir, *generator, *options], check=True)
    subprocess.run([cmake, "--build", build_dir, "--parallel"], check=True)


def build_native_libraries(target: Path) -> None:
    """Fill target with the libraries that can be built here, and with build.json."""
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.glob("*.so"):
        stale.unlink()
    missing = None
    if importlib.util.find_spec("torch") is None:
        missing = "not built: torch is not importable in the build (use --no-build-isolation)"
    elif find_tool("cmake") is None:
        missing = "not built: cmake not found (pip install cmake ninja)"
    if missing:
        report = dict.fromkeys(FILES, missing)
    else:
        build_dir = ROOT / "build" / f"native-{sysconfig.get_platform()}"
        run_cmake(build_dir)
        report = json.loads((build_dir / "build.json").read_text())
        # By name: the folder may hold what an earlier build, with other compilers, has left there.
        for name in (name for name, outcome in report.items() if outcome.startswith("built")):
            shutil.copy2(build_dir / "lib" / FILES[name], target)
    (target / "build.json").write_text(json.dumps(report, indent=2) + "\n")
    for name, outcome in report.items():
        print(f"pyparallel: {name} library {outcome}")


class build_native(Command):
    """A sub-command of build, as setuptools' SubCommand protocol describes it."""

    description = "build the native libraries with CMake"
    user_options = []
    editable_mode = False
    build_lib = None

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def target(self) -> Path:
        return (ROOT if self.editable_mode else Path(self.build_lib)) / "pyparallel" / "_native"

    def run(self):
        build_native_libraries(self.target())

    def get_outputs(self):
        return [] if self.editable_mode else [str(path) for path in self.target().glob("*")]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        sources = [ROOT / "CMakeLists.txt", *(ROOT / "csrc").rglob("*.*")]
        return [str(path.relative_to(ROOT)) for path in sources]


class build_with_native(build):
    sub_commands = [*build.sub_commands, ("build_native", None)]


class wheel_for_any_python(bdist_wheel):
    """The ops use torch's stable ABI and no symbol of Python: one wheel per platform.

    The simulator's event loop serves the Python it was built with; others have it in plain Python.
    """

    def get_tag(self):
        native = list(Path(self.bdist_dir).glob("pyparallel/_native/*.so"))
        return "py3", "none", super().get_tag()[2] if native else "any"


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(
    distclass=PlatformDistribution,
    packages=[*find_packages(include=["pyparallel*"]), "pyparallel.kernels"],
    package_dir={"pyparallel.kernels": "kernels/triton"},
    package_data={"pyparallel": ["py.typed"]},
    cmdclass={
        "build": build_with_native,
        "build_native": build_native,
        "bdist_wheel": wheel_for_any_python,
    },
)
