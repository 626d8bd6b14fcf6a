"""``make gpu``: build for the cards of this machine, test, measure; one log and one CSV into --out.

Machines with GPUs often bring their own torch and no network. Where the calling Python has torch
with CUDA, an environment is made that sees its packages and installs nothing but pyparallel;
elsewhere the environment of ``make train`` is used, with the torch that constraints.txt names.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEES_GPU = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
STEPS = {
    "doctor": ["-m", "pyparallel", "doctor"],
    "tests": ["-m", "pytest", "-q", "tests/ops"],
    "benchmarks": ["-m", "benchmarks", "--device", "cuda", "--turns", "15"],
}


def environment_beside(folder: Path) -> Path:
    """A virtual environment that sees the calling Python's packages; its interpreter.

    Not ``system_site_packages``: made from within another environment, that would skip it.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    inside = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    outside = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(inside.stdout.strip(), "outside.pth").write_text("\n".join(outside) + "\n")
    return python


def sees_gpu(python: Path | str) -> bool:
    """Whether this interpreter has a torch that finds a GPU."""
    ask = subprocess.run([python, "-c", SEES_GPU], stderr=subprocess.DEVNULL, check=False)
    return ask.returncode == 0


def prepare() -> Path:
    """The interpreter of an environment in which pyparallel is installed."""
    if sees_gpu(sys.executable):
        python = environment_beside(ROOT / ".venv-gpu")
        install = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([python, *install, "--editable", ROOT], check=True)
        return python
    subprocess.run(["make", "-C", ROOT, ".venv/installed-AUTO"], check=True)
    return ROOT / ".venv" / "bin" / "python"


def run_steps(python: Path, out: Path) -> int:
    """Run all steps, also after one has failed; how many failed."""
    failures = 0
    with (out / "gpu.log").open("w") as log:
        for name, arguments in STEPS.items():
            extra = ["--out", str(out / "gpu.csv")] if name == "benchmarks" else []
            begin = time.monotonic()
            result = subprocess.run(
                [python, *arguments, *extra],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            failures += result.returncode != 0
            seconds = time.monotonic() - begin
            text = f"\n== {name}: exit {result.returncode}, {seconds:.0f} s\n{result.stdout}"
            print(text, flush=True)
            log.write(text)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    out = parser.parse_args().out.resolve()
    python = prepare()
    if not sees_gpu(python):
        sys.exit("make gpu: torch sees no GPU here; nothing was measured")
    out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.exit(run_steps(python, out))


if __name__ == "__main__":
    main()
