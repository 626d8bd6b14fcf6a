"""``make gpu``: test and measure on this machine's GPUs; a log and rows go to OUT.

In two parts for a GPU that is lent for minutes, what matters most first: ``make gpu
ARGS="--part 1"`` takes at most 370 seconds, part 2 310, and ``ARGS="--only doctor,bench"`` runs the
steps whose names begin so. What a step prints is in ``OUT/gpu.log`` as it comes, its rows, after
each case, in a CSV file named after the GPU, and a summary comes last. A step that fails or hangs
leaves the others' results.

``ARGS="--library pyparallel/_native"`` takes libraries that were built elsewhere, with
``PYPARALLEL_CUDA=ON`` and ``CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=90-real``, and came along:
nothing is installed, and the calling Python runs the steps. Without it each part builds first, for
at most 150 seconds. As machines with GPUs often have their own torch and no network, it then
creates an environment that sees the calling Python's packages if that has torch with CUDA; else it
uses that of ``make train``, with the torch of constraints.txt.

NCCL from 2.30 on lets two ranks share a GPU: ``PYPARALLEL_NCCL=libnccl.so.2 make gpu`` loads that
library in the steps that try it. ``make gpu ARGS=--dry-run`` prints the steps with their limits,
and runs them on the CPU with little data, to test them.
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
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.build import environment_beside, path_with_tools, take
from benchmarks.harness.commands import Step, run_steps

ROOT = Path(__file__).resolve().parent.parent
SEES_GPU = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
MACHINE = "from benchmarks.harness.rows import commit, machine; print(machine(), commit())"
CARD = "import subprocess; subprocess.run(['nvidia-smi', '-q'], check=True)"
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
# What is measured beside peers, which compile for seconds each: cases, and seconds.
PEERS = {
    "steps": (r"float32 \+ 1 float32|float32 to float32|step|all in one", 45),
    "codes": (r"int8 \+ residual|int8 from bfloat16|sum of 8 int8", 50),
    "entries": (r"1.0%.*", 20),
}
# Exponents of two, or numbers of elements: of 1 MiB more than a power of two, so that streams of
# several buffers do not walk the memory's channels in step, and of a bucket of DDP.
SIZES = {"bench": ["27"], "apart": [2**27 + 2**18], "peers": ["24", "20", "27"], "ddp": [6 * 2**20]}
DRY_SIZES = {"bench": ["12"], "apart": [2**12 + 2**8], "peers": ["13"], "ddp": [6 * 2**10]}
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


def plan(
    out: Path, rows: Path, *, has_library: bool = False, dry: bool = False
) -> list[list[Step]]:
    """Return the steps of both parts; ``dry``: on the CPU with little data, where they can run.

    Ours and the copy are measured first, which takes seconds.
    """
    device, sizes, turns = ("cpu", DRY_SIZES, "2") if dry else ("cuda", SIZES, "15")
    plain = {"TORCHDYNAMO_DISABLE": "1"} if dry else {}  # compiling the peers tests no step
    workers = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
    nccl = {"LD_PRELOAD": library} if (library := os.environ.get("PYPARALLEL_NCCL")) else {}
    nccl |= SHARED_GPU

    def program(name: str, module: str, seconds: float, *options: str) -> Step:
        arguments = ["-m", f"benchmarks.{module}", *options, "--device", device, "--out", str(rows)]
        return Step(name, arguments, seconds, environment=plain)

    def bench(name: str, seconds: float, kind: str, ops: Sequence[str], *options: str) -> Step:
        chosen = ["--ops", *ops, "--sizes", *map(str, sizes[kind]), "--turns", turns]
        return program(name, "__main__", seconds, *chosen, "--seconds", "{seconds}", *options)

    def test(name: str, seconds: float, *arguments: str, workers: int = 0, **options) -> Step:
        return Step(name, pytest(out, name, *arguments, workers=workers), seconds, **options)

    def of_two_ranks(name: str, seconds: float) -> Step:
        chosen = ["tests/gpu/test_two_ranks.py", "-k", f"compare_{name}"]
        return test(f"nccl-{name}", seconds, *chosen, environment=nccl, optional=True)

    build = Step("build", ["-m", "benchmarks.harness.build", *["--report"] * dry], 150)
    tests = memory_tests = "tests/ops/test_mix.py", "-k", "compiled-cpu"
    alone = ["--ranks", "2", "--numel", "4096"]  # gloo sends nothing to itself
    if not dry:
        tests, memory_tests = ("tests/ops", "-k", CUDA_TESTS), ("tests/ops", "-k", MEMORY_TESTS)
        alone = ["--ranks", "1", "--max-ctas", "2", "4", "8", "16"]
    # With the cache an access beyond a tensor hits another.
    memory = {"environment": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "optional": True}
    if tool := shutil.which("compute-sanitizer"):
        memory["prefix"] = (tool, "--tool", "memcheck", "--error-exitcode", "9")
    once = ["--turns", "1"] if dry else []
    link = ["--trace", str(out / "overlap-link.json.gz"), *["--caps", "64", "--slower", "0"] * dry]
    first = [
        *([] if has_library else [build]),
        Step("card", ["-c", CARD], 5, optional=True),
        Step("doctor", ["-m", "pyparallel", "doctor"], 15),
        *(bench(f"bench-{name}", 22, "bench", ops, "--no-peers") for name, ops in OPS.items()),
        bench("apart", 15, "apart", ["mix", "predict_adam", "adamw_step"], "--no-peers"),
        program("held-sms", "ops.held_sms", 25, *once),
        program("overlap-link", "gossip.overlap_link", 60, *link, *once),
        program("overlap-1", "ops.overlap", 30, *alone, *once),
        test("tests-cuda", 60, *tests, workers=workers),
        test("tests-device", 25, "tests/gpu/test_ops.py", workers=min(4, workers)),
        test("symmetric-memory", 25, "tests/gpu/test_symmetric_memory.py", optional=True),
    ]
    second = [
        *([] if has_library else [build]),
        *(
            bench(f"peers-{name}", seconds, "peers", OPS[name], "--cases", cases)
            for name, (cases, seconds) in PEERS.items()
        ),
        bench("peers-hooks", 25, "ddp", OPS["hooks"]),
        of_two_ranks("gossip", 30),
        of_two_ranks("pipelines", 30),
        of_two_ranks("hooks", 20),
        of_two_ranks("attention", 20),
        *([test("memcheck", 40, *memory_tests, **memory)] if tool or dry else []),
        test("tests-training", 30, "tests/gpu/test_training.py"),
    ]
    return [first, second]


def describe(parts: Sequence[Sequence[Step]]) -> str:
    """Return the steps of each part in their order, with their limits, and the sum of these."""
    sums = [sum(step.seconds for step in part) for part in parts]
    lines = [
        f"part {number}, {total:.0f} s: "
        + ", ".join(f"{step.name} {step.seconds:.0f}" for step in part)
        for number, (part, total) in enumerate(zip(parts, sums, strict=True), 1)
    ]
    return "\n".join([*lines, f"in all {sum(sums):.0f} s", ""])


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


def find_python(*, installs: bool) -> Path:
    """Return an interpreter that has torch with CUDA, of an environment if a step installs.

    Exits without a GPU.
    """
    here = sees_gpu(sys.executable)
    if not here and (not installs or shutil.which("nvidia-smi") is None):
        sys.exit("make gpu: no GPU found; nothing was measured (try ARGS=--dry-run)")
    if here:
        return environment_beside(ROOT / ".venv-gpu") if installs else Path(sys.executable)
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
    parser.add_argument("--seconds", type=float, help="limit in total; default: the steps' sum")
    parser.add_argument(
        "--library", type=Path, help="folder of libraries that were built elsewhere"
    )
    parser.add_argument("--dry-run", action="store_true", help="the same steps on the CPU")
    options = parser.parse_args()
    begin = time.monotonic()
    out, library = options.out.resolve(), options.library and options.library.resolve()
    os.chdir(ROOT)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of processes with gigabytes of GPU memory
    plan_of = partial(plan, out, has_library=library is not None, dry=options.dry_run)
    parts = plan_of(out / "gpu.csv")
    choose(parts, options.part, options.only)  # a mistake ends here
    print(describe(parts))
    if options.dry_run:
        python = Path(sys.executable) if find_spec("torch") else make_environment()
    else:
        python = find_python(installs=library is None)
        if library is not None:
            take(library)
    os.environ["PATH"] = path_with_tools(python)
    os.environ["PYTHONPATH"] = str(ROOT)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.log").unlink(missing_ok=True)  # of an earlier run; rows are replaced one by one
    ask = subprocess.run([python, "-c", MACHINE], stdout=subprocess.PIPE, text=True, check=False)
    name, os.environ["PYPARALLEL_COMMIT"] = ask.stdout.split() or ("gpu", "unknown")
    rows = out / f"{name}.csv"
    steps = choose(plan_of(rows), options.part, options.only)
    if options.dry_run:  # two slow cores may also test something else
        steps = [replace(step, seconds=8 * step.seconds) for step in steps]
    limit = options.seconds or sum(step.seconds for step in steps)
    failed, _ = run_steps(steps, python, out, limit - (time.monotonic() - begin))
    sys.exit(f"make gpu: failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
