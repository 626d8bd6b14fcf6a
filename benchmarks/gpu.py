"""``make gpu``: build for this machine's GPUs, test and benchmark; writes a log and a CSV to OUT.

Machines with GPUs often have their own torch and no network. If the calling Python has torch with
CUDA, an environment is created that sees its packages and installs only pyparallel; otherwise the
environment of ``make train`` is used, with the torch of constraints.txt.

``make gpu ARGS=--dry-run`` runs the same steps on the CPU with little data, to test the script.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEES_GPU = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"


@dataclass(frozen=True)
class Step:
    """A command of the environment's Python, or of another program, with its time limit.

    Args:
        optional: its failure is reported but does not fail the script, because it is experimental.
    """

    name: str
    arguments: Sequence[str]
    seconds: int
    program: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False


def plan(out: Path, dry: bool) -> list[Step]:
    """Return the steps: tests first, then benchmarks; under ten minutes in total."""
    rows = ["--out", str(out / "gpu.csv")]
    device = ["--device", "cpu" if dry else "cuda"]
    which = ["tests/ops/test_mix.py", "-k", "opcheck or refused"]
    if not dry:
        which = ["tests/ops", "-m", "slow or not slow"]
    sizes = ["--sizes", "12", "--turns", "2"] if dry else ["--turns", "15"]
    numel = ["--numel", "4096", "--turns", "2"] if dry else []
    # Compiling the baselines takes longest, and does not test this script.
    uncompiled = {"TORCHDYNAMO_DISABLE": "1"} if dry else {}
    sanitizer = ["-m", "pytest", "-q", "tests/ops", "-k", "corrupt or unaligned"]
    several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    overlap = ["-m", "benchmarks.ops.overlap", *device, *numel, *rows]
    steps = [
        Step("doctor", ["-m", "pyparallel", "doctor"], 60),
        Step("tests", ["-m", "pytest", "-q", "-p", "no:cacheprovider", *which], 240),
        Step("benchmarks", ["-m", "benchmarks", *device, *sizes, *rows], 300, None, uncompiled),
        Step("overlap, two ranks", [*overlap, "--ranks", "2"], 90, None, several, optional=True),
    ]
    if not dry:
        steps.insert(3, Step("overlap, one rank", [*overlap, "--ranks", "1"], 60))
        if tool := shutil.which("compute-sanitizer"):
            command = ["--error-exitcode", "9", sys.executable, *sanitizer]
            steps.append(Step("compute-sanitizer", command, 120, tool, optional=True))
    return steps


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


def sees_gpu(python: Path | str) -> bool:
    """Return whether this interpreter has a torch that finds a GPU."""
    ask = subprocess.run([python, "-c", SEES_GPU], stderr=subprocess.DEVNULL, check=False)
    return ask.returncode == 0


def prepare() -> Path:
    """Return the interpreter of an environment in which pyparallel is installed."""
    here = sees_gpu(sys.executable)
    if not here and shutil.which("nvidia-smi") is None:
        sys.exit("make gpu: no GPU found; nothing was measured (try ARGS=--dry-run)")
    if here:
        python = environment_beside(ROOT / ".venv-gpu")
        install = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([python, *install, "--editable", ROOT], check=True)
        return python
    subprocess.run(["make", "-C", ROOT, ".venv/installed-AUTO"], check=True)
    python = ROOT / ".venv" / "bin" / "python"
    if not sees_gpu(python):
        sys.exit("make gpu: torch finds no GPU; nothing was measured (try ARGS=--dry-run)")
    return python


def run_step(step: Step, python: Path) -> tuple[int, str]:
    """Return exit status (124: timeout) and output of a step."""
    command = [step.program or python, *step.arguments]
    if step.program:
        command[command.index(sys.executable)] = python
    environment = {**os.environ, **step.environment}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=step.seconds,
        )
    except subprocess.TimeoutExpired as error:
        return 124, (error.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout


def run_steps(steps: Sequence[Step], python: Path, out: Path) -> list[str]:
    """Run all steps, even if some fail; return the names of the failed ones."""
    failed = []
    with (out / "gpu.log").open("w") as log:
        for step in steps:
            begin = time.monotonic()
            status, output = run_step(step, python)
            seconds = time.monotonic() - begin
            outcome = f"exit {status}{' (optional)' if step.optional else ''}, {seconds:.0f} s"
            text = f"\n== {step.name}: {outcome}\n{output}"
            print(text, flush=True)
            log.write(text)
            log.flush()
            if status and not step.optional:
                failed.append(step.name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--dry-run", action="store_true", help="the same steps on the CPU")
    options = parser.parse_args()
    out = options.out.resolve()
    python = Path(sys.executable) if options.dry_run else prepare()
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.csv").unlink(missing_ok=True)  # from an earlier run: overlap appends
    os.environ["PYTHONPATH"] = str(ROOT)
    failed = run_steps(plan(out, options.dry_run), python, out)
    sys.exit(f"make gpu: failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
