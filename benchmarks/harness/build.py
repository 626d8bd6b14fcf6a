"""``python -m benchmarks.harness.build``: build the libraries for the GPUs of this machine.

pip installs pyparallel as it is (editable). If that fails, cmake builds in the same folder, and
then without CUDA, so that Triton's kernels can be tested and measured in any case. What was built
is printed; without the CUDA library the exit status is 1. ``--report`` only prints.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "pyparallel" / "_native"
LIBRARIES = {
    "cpu": "libpyparallel_cpu.so",
    "cuda": "libpyparallel_cuda.so",
    "simulate": f"simulate{sysconfig.get_config_var('EXT_SUFFIX')}",
}
PIP = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--verbose"]


def environment_beside(folder: Path) -> Path:
    """Create a virtual environment that sees the calling Python's packages; return its interpreter.

    Not with ``system_site_packages``: inside another environment, that would skip its packages.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    inside = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    outside = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(inside.stdout.strip(), "outside.pth").write_text("\n".join(outside) + "\n")
    return python


def path_with_tools(python: Path) -> str:
    """Return PATH with this environment's programs, the calling Python's and CUDA's in front.

    cmake and ninja are often scripts of the Python that has torch.
    """
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folders = [python.parent, Path(sys.executable).parent, sysconfig.get_path("scripts")]
    front = [str(folder) for folder in (*folders, Path(cuda, "bin"))]
    return os.pathsep.join([*dict.fromkeys(front), os.environ.get("PATH", os.defpath)])


def install() -> None:
    """Install with pip; if that fails, build with cmake, at last without CUDA."""
    (NATIVE / "build.json").unlink(missing_ok=True)  # of another machine
    pip = [sys.executable, *PIP, "--editable", ROOT]
    if subprocess.run(pip, check=False).returncode == 0:
        return
    for cuda in ("AUTO", "OFF"):
        print(f"\npip failed: cmake builds, with PYPARALLEL_CUDA={cuda}", flush=True)
        if build(cuda):
            return


def build(cuda: str) -> bool:
    """Build with cmake alone, where setup.py builds; return whether that succeeded."""
    folder = ROOT / "build" / f"native-{sysconfig.get_platform()}"
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPYTHON_EXECUTABLE={sys.executable}"]
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", ROOT, "-B", folder, *ninja, *options, f"-DPYPARALLEL_CUDA={cuda}"]
    for command in (configure, ["cmake", "--build", folder, "--parallel"]):
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"not built: {error}", flush=True)
            return False
    NATIVE.mkdir(exist_ok=True)
    outcomes = json.loads((folder / "build.json").read_text())
    for name, outcome in outcomes.items():
        if outcome.startswith("built"):
            shutil.copy2(folder / "lib" / LIBRARIES[name], NATIVE)
    shutil.copy2(folder / "build.json", NATIVE)
    link_kernels()
    return True


def link_kernels() -> None:
    """Make Triton's kernels importable where setup.py would install them."""
    kernels = ROOT / "pyparallel" / "kernels"
    if not kernels.exists():
        kernels.symlink_to("../kernels/triton")


def take(folder: Path) -> None:
    """Use libraries that were built elsewhere; exit if there is none for GPUs among them."""
    if not (folder / LIBRARIES["cuda"]).exists():
        sys.exit(f"--library must be a folder with {LIBRARIES['cuda']}, got {folder}")
    link_kernels()
    if folder.resolve() == NATIVE.resolve():
        return
    NATIVE.mkdir(exist_ok=True)
    for name in ("build.json", *LIBRARIES.values()):
        (NATIVE / name).unlink(missing_ok=True)
        if (folder / name).exists():
            shutil.copy2(folder / name, NATIVE)


def report() -> bool:
    """Print what was built; return whether the CUDA library was."""
    path = NATIVE / "build.json"
    outcomes = json.loads(path.read_text()) if path.exists() else {}
    for name in LIBRARIES:
        print(f"{name} library: {outcomes.get(name, 'not built: the build has failed')}")
    cuda = outcomes.get("cuda", "not built").startswith("built")
    if not cuda:
        print(f"{'=' * 80}\nTriton's kernels run in place of CUDA's, and all other steps go on.")
        print("THE CUDA LIBRARY WAS NOT BUILT: its tests fail, and its rows are missing.")
    return cuda


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.build", description=__doc__)
    parser.add_argument("--report", action="store_true", help="build nothing, and exit with 0")
    options = parser.parse_args()
    if not options.report:
        install()
    has_cuda = report()
    sys.exit(0 if has_cuda or options.report else 1)


if __name__ == "__main__":
    main()
