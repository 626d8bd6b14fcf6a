"""The examples as a user runs them: torchrun with one thread per rank, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def observe_example(script, num_ranks, *arguments):
    """Run an example on a number of ranks; return its exit code and output."""
    return subprocess.run(
        [*TORCHRUN, str(num_ranks), f"examples/{script}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=ENVIRONMENT,
    )


def run_example(script, num_ranks, *arguments):
    """Run an example, which must succeed; return what it printed, and the rows of its table."""
    result = observe_example(script, num_ranks, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result, rows_of(result.stdout)


def rows_of(printed):
    """Return the cells of the table by the name of the row, in the order of its columns."""
    table = printed.split("\n\n")[1]
    return {
        re.split(r"\s{3,}", line)[0]: re.split(r"\s{3,}", line)[1:] for line in table.splitlines()
    }


def numbers(cells):
    """Return the numbers of a row, without units."""
    return [float(cell.replace(",", "").rstrip(" %")) for cell in cells]


def load_line(printed):
    """Return the printed line of Python that loads the model."""
    return printed.partition("started in this folder:\n")[2].strip().splitlines()[0].strip()


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
