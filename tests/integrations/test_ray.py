"""Ray Train on this machine: a worker that is killed is replaced, and the others train on."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray", reason="an extra: pip install 'ray[train]'")
pytest.importorskip("torchft")
pytestmark = pytest.mark.slow  # starts Ray
NUM_WORKERS, KILLED, LIMIT = 3, 1, 300


def read(path):
    """Return the rows of a rank's file, without a line that is being written."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [row for row in map(json.loads, lines) if "step" in row]


def wait_for(condition, process):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_that_is_killed_is_replaced_and_the_others_lose_no_step(tmp_path):
    variables = {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "examples/clusters/ray_digits.py", "--out", tmp_path]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--steps", "5000"], env=os.environ | variables, stdout=log, stderr=log
        )
    try:
        paths = [tmp_path / f"rank-{rank}.jsonl" for rank in range(NUM_WORKERS)]
        wait_for(lambda: all(len(read(path)) > 20 for path in paths), process)
        first = read(paths[KILLED])[-1]
        os.kill(first["process"], signal.SIGKILL)
        wait_for(lambda: read(paths[KILLED])[-1]["process"] != first["process"], process)
        joined = next(row for row in read(paths[KILLED]) if row["process"] != first["process"])
        assert joined["members"] == NUM_WORKERS
        assert process.wait(LIMIT) == 0, (tmp_path / "log").read_text()
    finally:
        process.terminate()
        process.wait(30)
    for path in (each for each in paths if each != paths[KILLED]):
        rows = read(path)
        assert [row["step"] for row in rows] == list(range(5000))  # none lost, none taken again
        assert len({row["process"] for row in rows}) == 1
        assert rows[-1]["loss"] < 0.5 < rows[0]["loss"]
        stall = max(b["time"] - a["time"] for a, b in itertools.pairwise(rows))
        assert stall < 20
