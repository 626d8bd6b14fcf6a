"""``make gpu`` without a GPU: the same steps on the CPU, with little data."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import OPS
from benchmarks.gpu import Step, run_steps
from benchmarks.harness.pictures import drawn
from benchmarks.harness.rows import read_rows
from benchmarks.ops.picture import PICTURES

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", *arguments]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 400}
    return subprocess.run(command, check=False, **options)


@pytest.mark.slow
def test_the_dry_run_runs_every_step_and_measures_every_op(tmp_path):
    done = run("--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "gpu.log").read_text()
    for step in ("doctor", "tests", "benchmarks", "overlap, two ranks"):
        assert f"== {step}: exit 0" in log
    rows = read_rows(tmp_path / "gpu.csv")
    assert {row["op"] for row in rows} >= {*OPS, "overlap"}
    assert drawn(PICTURES, rows, tmp_path) == ["mixing", "compressing"]


def test_steps_continue_after_a_reported_failure(tmp_path):
    steps = [
        Step("fails", ["-c", "raise SystemExit(3)"], 60),
        Step("hangs", ["-c", "import time; print('begun', flush=True); time.sleep(60)"], 1),
        Step("may fail", ["-c", "raise SystemExit(4)"], 60, optional=True),
        Step(
            "works", ["-c", "import os; print(os.environ['WORD'])"], 60, environment={"WORD": "w"}
        ),
    ]
    assert run_steps(steps, Path(sys.executable), tmp_path) == ["fails", "hangs"]
    log = (tmp_path / "gpu.log").read_text()
    assert "== fails: exit 3" in log
    assert "== hangs: exit 124" in log
    assert "begun" in log
    assert "== may fail: exit 4 (optional)" in log
    assert "== works: exit 0" in log


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="it would run")
def test_without_a_gpu_the_error_names_an_alternative():
    done = run()
    assert done.returncode != 0
    assert "ARGS=--dry-run" in done.stderr
