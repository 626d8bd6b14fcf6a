"""The examples as a user runs them: torchrun with one thread per rank, and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time

import pytest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_example(script, num_ranks, *arguments):
    """Run an example on a number of ranks, which must succeed; return its output."""
    result = subprocess.run(
        [*TORCHRUN, str(num_ranks), f"examples/{script}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def assert_ctrl_c_ends_all(script, num_ranks, *arguments, shown):
    """Press Ctrl-C, which goes to the launcher and every rank, a second after text is shown."""
    process = subprocess.Popen(
        [*TORCHRUN, str(num_ranks), f"examples/{script}", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    while shown not in process.stderr.readline(200):
        assert process.poll() is None
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=40)
    assert time.monotonic() - begin < 35
    assert process.returncode != 0
    assert b"terminate called" not in errors
    with pytest.raises(ProcessLookupError):  # no rank is left behind
        os.killpg(process.pid, 0)
