"""``make gpu`` without a GPU: the same steps on the CPU, with little data; steps that go wrong."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.__main__ import CODECS, HOOKS, OPS
from benchmarks.harness import build
from benchmarks.harness.commands import Step, run_steps
from benchmarks.harness.pictures import drawn
from benchmarks.harness.rows import commit, read_rows
from benchmarks.ops.picture import PICTURES
from tests.gpu import test_large

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["benchmarks", "csrc", "kernels", "pyparallel", "tests"]
FILES = ["CMakeLists.txt", "pyproject.toml"]
FORKS = """
import os, time
if os.fork() == 0:
    print("child", os.getpid(), flush=True)
time.sleep(60)
"""


def run(*arguments: str | Path, tree: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    options = {"cwd": tree, "capture_output": True, "text": True, "timeout": 1500}
    return subprocess.run(command, check=False, **options)


def copied(target: Path) -> Path:
    """Copy the tree without what was built."""
    ignored = shutil.ignore_patterns("__pycache__", "_native", "results", "states")
    for name in SOURCES:
        shutil.copytree(ROOT / name, target / name, ignore=ignored, symlinks=True)
    for name in FILES:
        shutil.copy(ROOT / name, target)
    return target


def python(code: str, name: str, seconds: float = 60, **options) -> Step:
    return Step(name, ["-c", code], seconds, **options)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_the_dry_run_runs_every_step_and_measures_every_op(tmp_path):
    done = run("--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "gpu.log").read_text()
    steps = gpu.choose(gpu.plan(tmp_path, tmp_path / "rows.csv", dry=True), None, "")
    for step in steps:
        has_failed = step.name == "card" and shutil.which("nvidia-smi") is None
        assert f"== {step.name}{' (optional)' * step.optional}: exit {int(has_failed)}" in log
    (path,) = tmp_path.glob("*.csv")
    rows = read_rows(path)
    assert {row["op"] for row in rows} >= {*OPS, CODECS, HOOKS, "overlap", "held_sms"}
    assert {row["numel"] for row in rows if row["op"] == "mix"} == {"4096", "4352", "8192"}
    assert drawn(PICTURES, rows, tmp_path) == ["mixing", "compressing"]
    assert (tmp_path / "overlap-link.json.gz").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_without_the_library_other_steps_leave_their_results(tmp_path):
    tree = copied(tmp_path)
    only = "build,doctor,tests-cuda,bench-entries"
    done = run("--dry-run", "--only", only, "--out", tmp_path / "out", tree=tree)
    assert done.stderr.endswith("make gpu: failed: tests-cuda\n"), done.stdout + done.stderr
    assert "THE CUDA LIBRARY WAS NOT BUILT" in done.stdout
    assert "the compiled C++ library is not built" in done.stdout  # the tests' own words
    (path,) = (tmp_path / "out").glob("*.csv")
    assert {row["op"] for row in read_rows(path)} >= set(gpu.OPS["entries"])
    assert (tmp_path / "out" / "tests-cuda.xml").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_cmake_builds_where_pip_fails(tmp_path, monkeypatch):
    tree = copied(tmp_path)
    monkeypatch.setattr(build, "ROOT", tree)
    monkeypatch.setattr(build, "NATIVE", tree / "pyparallel" / "_native")
    monkeypatch.setattr(build, "PIP", ["-c", "raise SystemExit(1)"])
    monkeypatch.setenv("PATH", build.path_with_tools(Path(sys.executable)))
    monkeypatch.setenv("CUDACXX", "/no/nvcc")  # the C++ library alone: CUDA's takes another minute
    build.install()
    assert (build.NATIVE / "libpyparallel_cpu.so").exists()
    assert (tree / "pyparallel/kernels/__init__.py").exists()
    code = "from pyparallel import ops; print(ops.BACKENDS['cpu'][0].unavailable_reason)"
    ask = [sys.executable, "-c", code]
    done = subprocess.run(ask, cwd=tree, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


def test_steps_continue_after_a_reported_failure(tmp_path, capfd):
    steps = [
        python("print('three'); raise SystemExit(3)", "fails"),
        python(FORKS, "hangs", 1),
        python("raise SystemExit(4)", "may fail", optional=True),
        python("import os; os.abort()", "dies"),
        python("import os; print(os.environ['WORD'])", "works", environment={"WORD": "w"}),
        Step("told", ["-c", "import sys; print(sys.argv[1:])", "{seconds}"], 30),
    ]
    failed, summary = run_steps(steps, Path(sys.executable), tmp_path, 100)
    assert failed == ["fails", "hangs", "dies"]
    log = (tmp_path / "gpu.log").read_text()
    assert log == capfd.readouterr().out
    starts = ("fails: exit 3", "hangs: timed out", "may fail (optional): exit 4", "dies: killed by")
    starts += "works: exit 0", "told: exit 0"
    for start, line in zip(starts, summary, strict=True):
        assert line.startswith(start), summary
        assert f"== {line}\n" in log
    assert [line.rpartition(": ")[2] for line in summary[-2:]] == ["w", "['20']"]
    assert "== hangs: at most 1 s\n" in log
    assert "Fatal Python error: Aborted" in log  # the stacks of the step that hangs
    child = int(log.partition("child ")[2].split()[0])
    assert not is_alive(child)


@pytest.mark.slow
def test_steps_keep_a_limit_in_total(tmp_path):
    steps = [python("import time; time.sleep(60)", "long"), python("print(1)", "late")]
    steps.append(python("print(2)", "later", optional=True))
    failed, summary = run_steps(steps, Path(sys.executable), tmp_path, 1)
    assert failed in (["late"], ["long", "late"])  # a second passes quickly here
    assert summary[-1] == "later (optional): not run: no time is left"


@pytest.mark.slow
def test_steps_end_with_a_caller_that_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from benchmarks.harness.commands import Step, run_steps\n"
        f"step = Step('hangs', ['-c', {FORKS!r}], 60)\n"
        f"run_steps([step], Path(sys.executable), Path({str(tmp_path)!r}), 60)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    log = tmp_path / "gpu.log"
    found = wait_for(lambda: log.exists() and re.search(r"child (\d+)\n", log.read_text()))
    child = int(found[1])
    group = os.getpgid(child)
    assert is_alive(child)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    wait_for(lambda: not is_alive(child) and not is_alive(group))


def test_the_plan_measures_every_op_in_seven_hundred_seconds(tmp_path):
    rows = tmp_path / "rows.csv"
    parts = gpu.plan(tmp_path, rows, has_library=True, dry=True)
    names = [[step.name for step in part] for part in parts]
    assert [len(set(each)) for each in names] == list(map(len, names))
    lines = gpu.describe(parts).splitlines()
    assert lines[0].startswith("part 1, 370 s: card 5, doctor 15, bench-steps 22, bench-codes 22")
    assert lines[1].startswith("part 2, 310 s: peers-steps 45, peers-codes 50, peers-entries 20")
    assert lines[2] == f"in all {sum(step.seconds for part in parts for step in part):.0f} s"
    assert int(lines[2].split()[2]) <= 700
    files = [name for name in names[0] if name.startswith(("tests", "symmetric"))]
    assert len(files) + len(["log", "rows", "trace"]) <= 8  # so many come back from a lent machine
    assert sorted(op for ops in gpu.OPS.values() for op in ops) == sorted([*OPS, CODECS, HOOKS])
    built = gpu.plan(tmp_path, rows)
    assert [part[0].name for part in built] == ["build", "build"]  # a fresh machine keeps none
    chosen = gpu.choose(built, None, "build,peers")
    assert [step.name for step in chosen] == ["build", *names[1][:4]]
    assert gpu.choose(parts, 2, "") == parts[1]
    with pytest.raises(SystemExit, match="--only must name steps, got 'x'; steps: card, doctor"):
        gpu.choose(parts, 1, "doctor,x")


def test_libraries_that_were_built_elsewhere_are_taken(tmp_path, monkeypatch):
    (tmp_path / "tree/pyparallel").mkdir(parents=True)
    (tmp_path / "tree/kernels/triton").mkdir(parents=True)
    native, carried = tmp_path / "tree/pyparallel/_native", tmp_path / "carried"
    monkeypatch.setattr(build, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(build, "NATIVE", native)
    carried.mkdir()
    with pytest.raises(SystemExit, match=r"must be a folder with libpyparallel_cuda\.so, got"):
        build.take(carried)
    for name in ("libpyparallel_cuda.so", "libtorch_cuda.so", "build.json"):
        (carried / name).write_text("new")
    native.mkdir()
    (native / build.LIBRARIES["cpu"]).write_text("of another commit")
    for folder in (carried, native):
        build.take(folder)
        assert {path.name for path in native.iterdir()} == {"libpyparallel_cuda.so", "build.json"}
    assert (tmp_path / "tree/pyparallel/kernels").is_dir()


LOSES_THE_GPU = """
import pytest, torch

def raise_error():
    raise torch.AcceleratorError("an illegal memory access was encountered")

@pytest.mark.parametrize("number", range(8))
def test_number(number):
    if number == 3:
        torch.cuda.is_current_stream_capturing = lambda: False
        torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, raise_error
"""


@pytest.mark.slow
def test_an_error_that_a_gpu_keeps_costs_one_test(tmp_path):
    (tmp_path / "test_lost.py").write_text(LOSES_THE_GPU)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "1", "test_lost.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    )
    # The one that lost the GPU has passed before its process ended.
    assert "1 failed, 8 passed" in done.stdout, done.stdout + done.stderr
    assert "can no longer use the GPU: an illegal memory access" in done.stderr


def test_a_machine_may_have_no_git(monkeypatch):
    monkeypatch.delenv("PYPARALLEL_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit.__wrapped__() == "unknown"


def test_all_large_cases_by_elements_fit_in_80_gigabytes(monkeypatch):
    monkeypatch.setattr(test_large, "memory", lambda: 79.6 * 2**30)
    skipped = []
    for case in test_large.BY_ELEMENTS:
        try:
            test_large.skip_beyond_the_memory(test_large.bytes_of(case))
        except pytest.skip.Exception as reason:
            skipped.append(f"{case.op}: {reason}")
    assert skipped == []


def test_another_nccl_is_loaded_only_where_ranks_share_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PYPARALLEL_NCCL", "/a/libnccl.so.2")
    _, second = gpu.plan(tmp_path, tmp_path / "rows.csv")
    loading = [step.name for step in second if "LD_PRELOAD" in step.environment]
    assert loading == [step.name for step in second if step.name.startswith("nccl")] != []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="it would run")
def test_without_a_gpu_the_error_names_an_alternative():
    done = run()
    assert done.returncode != 0
    assert "ARGS=--dry-run" in done.stderr
