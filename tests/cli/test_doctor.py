"""``python -m pyparallel doctor``: what runs each op, what is missing, and what that costs."""

import argparse
import csv
import statistics
import subprocess
from pathlib import Path

import pytest

from pyparallel import ops
from pyparallel.cli import doctor
from pyparallel.ops import Backend
from pyparallel.planning.pipelines.event_loop import Compiled

ROOT = Path(__file__).resolve().parents[2]
EVERY_OP = frozenset(ops.names())
NOT_INSTALLED = "not built: the package is used without being installed"
NO_GPU = "not loaded: torch sees no GPU"
PURE = {
    "cpu": (Backend("compiled C++", unavailable_reason=NOT_INSTALLED),),
    "cuda": (
        Backend("compiled CUDA", unavailable_reason=NOT_INSTALLED),
        Backend("Triton", unavailable_reason=NO_GPU),
    ),
}
LONG = "libpyparallel_cpu.with-a-name-that-is-longer-than-any-column.so"
ON_A_GPU = {
    "cpu": (Backend("compiled C++", Path(LONG), ops=EVERY_OP),),
    "cuda": (
        Backend("compiled CUDA", unavailable_reason="not built: nvcc not found"),
        Backend("Triton", ops=frozenset({"mix_", "predict_sgd"})),
    ),
}


def report():
    return doctor.report(argparse.Namespace(links=False, out=None))


@pytest.fixture
def machine(monkeypatch):
    """Return a function that makes the report that of another machine."""

    def change(backends, loop, has_gpu):
        monkeypatch.setattr(ops, "BACKENDS", backends)
        monkeypatch.setattr(doctor, "COMPILED", loop)
        monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: has_gpu)

    return change


def section(text, title):
    """Return the indented lines below a title."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == [title]) + 1
    stop = next((i for i in range(start, len(lines)) if lines[i][0] != " "), len(lines))
    return [line.strip() for line in lines[start:stop]]


def test_a_pure_python_install(machine):
    machine(PURE, Compiled(Path("simulate.so"), unavailable_reason=NOT_INSTALLED), has_gpu=False)
    text = report()
    assert section(text, "missing") == [
        "compiled C++ [1]: CPU ops run in plain PyTorch and take, by the median, at least 12 times "
        "(quantize), 11 times (pack_signs), 4 times (mix_quantized) as long",
        "compiled CUDA [1], Triton [2]: no cost without a GPU",
        "compiled event loop [1]: schedules are simulated in plain Python, slower; training is the "
        "same",
        f"[1] {NOT_INSTALLED}",
        f"[2] {NO_GPU}",
    ]
    assert text.count(NOT_INSTALLED) == text.count(NO_GPU) == 1
    assert (
        "pip install setuptools cmake ninja pybind11\n  pip install --no-build-isolation ." in text
    )
    rows = section(text, "ops")
    assert [row.split()[0] for row in rows] == list(ops.names())
    assert {tuple(row.split()[1:]) for row in rows} == {("PyTorch", "[1]", "PyTorch", "[1]", "[2]")}


def test_columns_hold_for_any_name(machine):
    machine(ON_A_GPU, Compiled(Path("simulate.so"), run_nothing), has_gpu=True)
    text = report()
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("ops "))
    for line in lines[lines.index(head) + 1 :][: len(EVERY_OP)]:
        assert line[head.index("cpu") :].startswith("compiled C++ ")
        assert line[head.index("cpu") - 1] == " "
        runs = "Triton [1]" if line.split()[0] in {"mix_", "predict_sgd"} else "PyTorch [1]"
        assert line[head.index("cuda") :] == runs
    assert section(text, "libraries")[0].split() == ["compiled", "C++", LONG]
    assert section(text, "missing") == [
        "compiled CUDA [1]: mix_, predict_sgd run in Triton on GPUs, other ops in PyTorch, in more "
        "passes",
        "[1] not built: nvcc not found",
    ]
    assert "pip install --no-build-isolation ." in text


def run_nothing(*arguments):
    raise NotImplementedError


def test_nothing_is_missing_where_all_is_loaded(machine):
    cuda = Backend("compiled CUDA", Path("libpyparallel_cuda.so"), ops=EVERY_OP)
    backends = {**ON_A_GPU, "cuda": (cuda, Backend("Triton"))}
    machine(backends, Compiled(Path("simulate.so"), run_nothing), has_gpu=True)
    assert "missing" not in report()
    assert "pip install" not in report()


def test_the_costs_are_those_of_the_committed_rows():
    with (ROOT / "benchmarks/results/amd-epyc-2-threads.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["provider"] == "torch ops"]
    measured = {
        op: statistics.median(float(row["speedup_of_ours"]) for row in rows if row["op"] == op)
        for op in {row["op"] for row in rows}
    }
    assert {op: round(times, 1) for op, times in measured.items()} == doctor.SPEEDUPS


def test_tools_that_fail_do_not_end_the_report(monkeypatch, tmp_path):
    def fail(command, **options):
        raise errors.pop() if errors else subprocess.TimeoutExpired(command, 20)

    errors = [PermissionError("no"), OSError("Exec format error")]
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None if name == "nvcc" else name)
    monkeypatch.setattr(doctor.subprocess, "run", fail)
    assert section(report(), "tools") == [
        "c++    does not run: OSError (c++)",
        "nvcc   not found",
        "cmake  does not run: PermissionError (cmake)",
        "ninja  does not run: TimeoutExpired (ninja)",
    ]
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nprintf '\\377'\nexit 1\n")
    silent.chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: str(silent))
    assert section(report(), "tools")[0] == f"c++    ? ({silent})"


def test_a_kernel_runs_on_every_device(monkeypatch):
    assert "devices" not in report().splitlines() or doctor.torch.cuda.is_available()
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor.torch.cuda, "get_device_name", lambda index: "card")
    monkeypatch.setattr(doctor.torch, "device", lambda kind, index: f"cpu:{index}")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    assert devices() == {
        "cpu:0": "mix_ runs",
        "cpu:1": "mix_ runs",
        "CUDA_MODULE_LOADING": (
            "LAZY: pipelines send new shapes through the host, with EAGER over NCCL"
        ),
    }
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setattr(doctor.ops, "mix_", lambda *arguments: None)
    assert devices()["cpu:1"] == "mix_ gives 0.0, not 0.5"
    assert devices()["CUDA_MODULE_LOADING"] == "EAGER"
    monkeypatch.setattr(doctor.torch, "device", lambda kind, index: f"none:{index}")
    assert devices()["none:0"].startswith("mix_ fails: RuntimeError: ")


def devices():
    return dict(line.split(maxsplit=1) for line in section(report(), "devices"))


def test_packages_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(doctor, "_PACKAGES", ("torch", "no-such-package"))
    rows = dict(line.split(maxsplit=1) for line in section(report(), "versions"))
    assert rows["no-such-package"] == "not installed"
