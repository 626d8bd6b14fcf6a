"""``make gpu``: build for this machine's GPUs, test and measure; a log and rows go to OUT.

In two parts of at most 560 seconds each, what matters most first: ``make gpu ARGS="--part 1"``, or
``ARGS="--only build,bench"`` for the steps whose names begin so. What a step prints is in
``OUT/gpu.log`` as it comes, its rows in a CSV file named after the GPU, and a summary comes last. A
step that fails or hangs leaves the others' results.

Machines with GPUs often have their own torch and no network. If the calling Python has torch with
CUDA, an environment is created that sees its packages and installs only pyparallel; otherwise the
environment of ``make train`` is used, with the torch of constraints.txt.

NCCL from 2.30 on lets two ranks share a GPU: ``PYPARALLEL_NCCL=libnccl.so.2 make gpu`` loads that
library in the steps that try it. ``make gpu ARGS=--dry-run`` runs the steps on the CPU with
little data, to test them.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.build import environment_beside, path_with_tools
from benchmarks.harness.commands import Step, run_steps

ROOT = Path(__file__).resolve().parent.parent
SEES_GPU = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
MACHINE = "from benchmarks.harness.rows import commit, machine; print(machine(), commit())"
SECONDS_OF_PART = 560
CUDA_TESTS = "compiled-cuda or on_cuda"
MEMORY_TESTS = "compiled-cuda and (unaligned or corrupt) or on_cuda"
# Each in a process of its own: an error of a kernel ends all that comes after it in its process.
OPS = {
    "steps": ["mix", "adamw_step", "predict_adam", "sgd_step", "predict_sgd"],
    "codes": ["quantize", "pack_signs", "mix_quantized", "quantize_difference"],
    "entries": ["top_k", "random_k", "orthogonalize"],
    "hooks": ["hooks"],
    "outer-steps": ["codecs"],
}
SIZES = ["27"], ["30", "24", "20"]  # of the first part and of the second
# GPT-2 of 124 million parameters
LARGE_MODEL = ["--width", "768", "--layers", "12", "--heads", "12", "--context", "1024"]
LARGE_MODEL += ["--steps", "60", "--lr", "0.0006", "--sample-every", "60", "--save-every", "60"]
# Two ranks of one GPU; with more multiprocessors each, they may wait for each other's forever.
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}


def pytest(out: Path, name: str, *arguments: str, workers: int = 0) -> list[str]:
    """Return the arguments of a run of tests, whose outcomes also go to ``out/<name>.xml``.

    Warnings are no errors: a missing library warns at import, which must not fail every file.
    """
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    report = ["-v", "-W", "default", "--tb=short", f"--junitxml={out / name}.xml"]
    parallel = ["-n", str(workers), "--dist", "worksteal"] if workers else []
    return ["-m", "pytest", *plugins, *report, *parallel, *arguments]


def bench(name: str, device: str, rows: Path, *options: str) -> list[str]:
    ops = ["-m", "benchmarks", "--ops", *OPS[name], "--device", device]
    return [*ops, *options, "--seconds", "{seconds}", "--out", str(rows)]


def overlap(ranks: int, rows: Path, *options: str) -> list[str]:
    program = ["-m", "benchmarks.ops.overlap", "--ranks", str(ranks)]
    return [*program, *options, "--out", str(rows)]


def plan(out: Path, rows: Path) -> list[list[Step]]:
    """Return the steps of both parts.

    Ours and the copy are measured first, which takes seconds; peers compile for minutes, as do
    Triton's tests, and may use up their part.
    """
    workers = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
    folders = ("pipeline", "compression", "gossip", "subnets")
    found = [path for folder in folders for path in (ROOT / "tests" / folder).rglob("*gpu*.py")]
    trainers = ["tests/gpu/test_training.py", *(str(path.relative_to(ROOT)) for path in found)]
    nccl = {"LD_PRELOAD": library} if (library := os.environ.get("PYPARALLEL_NCCL")) else {}
    nccl |= SHARED_GPU
    large, sizes = (["--turns", "15", "--sizes", *exponents] for exponents in SIZES)
    build = Step("build", ["-m", "benchmarks.harness.build"], 150)

    def recipe(name: str, ranks: int) -> Step:
        program = ["--nproc-per-node", str(ranks), "examples/language_model.py", "--recipe", name]
        arguments = ["-m", "torch.distributed.run", "--standalone", *program, *LARGE_MODEL]
        arguments += ["--out", str(out / "recipes" / name)]
        return Step(f"recipe-{name}", arguments, 60, (), nccl if ranks > 1 else {}, True)

    def test(name: str, seconds: float, *arguments: str, workers: int = 0, **options) -> Step:
        return Step(name, pytest(out, name, *arguments, workers=workers), seconds, **options)

    first = [
        build,
        Step("doctor", ["-m", "pyparallel", "doctor"], 30),
        *(
            Step(f"bench-{name}", bench(name, "cuda", rows, *large, "--no-peers"), 40)
            for name in OPS
        ),
        test("tests-cuda", 90, "tests/ops", "-k", CUDA_TESTS, workers=workers),
        test("tests-device", 60, "tests/gpu/test_ops.py", workers=min(4, workers)),
        Step("overlap-1", overlap(1, rows, "--device", "cuda"), 45),
        test("tests-training", 90, *trainers),
        test("symmetric-memory", 90, "tests/gpu/test_symmetric_memory.py", optional=True),
        test("nccl", 150, "tests/gpu/test_two_ranks.py", environment=nccl, optional=True),
        Step("overlap-2", overlap(2, rows, "--device", "cuda"), 45, (), nccl, True),
        recipe("ddp", 1),
        *(recipe(name, 2) for name in ("gossip", "diloco", "compressed", "pipeline")),
        recipe("mesh", 4),
        *(Step(f"peers-{name}", bench(name, "cuda", rows, *large), 75) for name in OPS),
        test("tests-triton", 110, "tests/ops", "-k", "triton", workers=workers),
    ]
    second = [
        build,
        *(Step(f"sizes-{name}", bench(name, "cuda", rows, *sizes), 90) for name in OPS),
        test("tests-large", 60, "tests/gpu/test_large.py"),
    ]
    memory = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else an access beyond a tensor hits another
    if tool := shutil.which("compute-sanitizer"):
        memcheck, racecheck = (
            {"prefix": (tool, "--tool", name, "--error-exitcode", "9"), "optional": True}
            for name in ("memcheck", "racecheck")
        )
        tests = ("tests/ops", "-k", MEMORY_TESTS)
        first.append(test("memcheck", 120, *tests, environment=memory, **memcheck))
        entries = [f"tests/ops/test_{name}.py" for name in ("top_k", "random_k")]
        tests = (*entries, "-k", "compiled-cuda and dtypes")
        second.append(test("racecheck", 150, *tests, **racecheck))
    return [first, second]


def dry_plan(out: Path, rows: Path) -> list[list[Step]]:
    """Return the same steps on the CPU with little data, where they can run there.

    Compiling the peers takes longest, and tests no step.
    """
    few = ["--turns", "2"]
    triton = ("tests/ops/test_predict_sgd.py", "-k", "triton")
    on_cpu = {
        "build": ["-m", "benchmarks.harness.build", "--report"],
        "tests-cuda": pytest(out, "tests-cuda", "tests/ops/test_mix.py", "-k", "compiled-cpu"),
        "tests-triton": pytest(out, "tests-triton", *triton),
        "overlap-2": overlap(2, rows, "--device", "cpu", "--numel", "4096", *few),
    }
    for step, *little in (
        ("bench", "--sizes", "12", *few, "--no-peers"),
        ("peers", "--sizes", "12", *few),
        ("sizes", "--sizes", "13", *few),
    ):
        on_cpu |= {f"{step}-{name}": bench(name, "cpu", rows, *little) for name in OPS}
    left_out = {"overlap-1", "memcheck", "racecheck"}  # gloo sends nothing to itself
    plain = {"TORCHDYNAMO_DISABLE": "1"}
    return [
        [
            replace(
                step,
                arguments=on_cpu.get(step.name, step.arguments),
                environment=plain,
                seconds=4 * step.seconds,  # two slow cores may also test something else
            )
            for step in part
            if step.name not in left_out and not step.name.startswith("recipe")
        ]
        for part in plan(out, rows)
    ]


def choose(parts: Sequence[Sequence[Step]], part: int | None, only: str) -> list[Step]:
    """Return the steps of a part (None: both) whose names begin with one of the words, if any."""
    chosen = parts if part is None else [parts[part - 1]]
    steps = {step.name: step for each in chosen for step in each}
    words = tuple(word for word in only.split(",") if word)
    unknown = [word for word in words if not any(name.startswith(word) for name in steps)]
    if unknown:
        sys.exit(f"make gpu: --only must name steps, got {unknown[0]!r}; steps: {', '.join(steps)}")
    return [step for step in steps.values() if not words or step.name.startswith(words)]


def sees_gpu(python: Path | str) -> bool:
    ask = subprocess.run([python, "-c", SEES_GPU], stderr=subprocess.DEVNULL, check=False)
    return ask.returncode == 0


def find_python() -> Path:
    """Return the interpreter of an environment that has torch with CUDA, for the step that builds.

    Exits without a GPU.
    """
    here = sees_gpu(sys.executable)
    if not here and shutil.which("nvidia-smi") is None:
        sys.exit("make gpu: no GPU found; nothing was measured (try ARGS=--dry-run)")
    if here:
        return environment_beside(ROOT / ".venv-gpu")
    python = make_environment()
    if not sees_gpu(python):
        sys.exit("make gpu: torch finds no GPU; nothing was measured (try ARGS=--dry-run)")
    return python


def make_environment() -> Path:
    """Make the environment in which ``make test`` runs; return its interpreter."""
    subprocess.run(["make", "-C", ROOT, ".venv/installed-AUTO", ".venv/tools"], check=True)
    return ROOT / ".venv" / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--part", type=int, choices=[1, 2], help="default: both")
    parser.add_argument("--only", default="", help="beginnings of names of steps, with commas")
    parser.add_argument(
        "--seconds", type=float, help=f"limit in total; default: {SECONDS_OF_PART} a part"
    )
    parser.add_argument("--dry-run", action="store_true", help="the same steps on the CPU")
    options = parser.parse_args()
    begin = time.monotonic()
    out = options.out.resolve()
    os.chdir(ROOT)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of processes with gigabytes of GPU memory
    parts = dry_plan if options.dry_run else plan
    choose(parts(out, out / "gpu.csv"), options.part, options.only)  # a mistake ends here
    if options.dry_run:
        python = Path(sys.executable) if find_spec("torch") else make_environment()
    else:
        python = find_python()
    os.environ["PATH"] = path_with_tools(python)
    os.environ["PYTHONPATH"] = str(ROOT)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.log").unlink(missing_ok=True)  # of an earlier run; rows are replaced one by one
    ask = subprocess.run([python, "-c", MACHINE], stdout=subprocess.PIPE, text=True, check=False)
    name, os.environ["PYPARALLEL_COMMIT"] = ask.stdout.split() or ("gpu", "unknown")
    rows = out / f"{name}.csv"
    steps = choose(parts(out, rows), options.part, options.only)
    limit = options.seconds or SECONDS_OF_PART * (2 if options.part is None else 1)
    failed, _ = run_steps(steps, python, out, limit - (time.monotonic() - begin))
    sys.exit(f"make gpu: failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
