"""Commands with a time limit each, which are logged while they run and end with their caller.

A command gets a session of its own. All its processes end with it, at its time limit, and when the
caller ends in any way: a rank that waits forever must not keep a GPU busy.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

TIMED_OUT = 124
MARGIN = 10  # seconds between the deadline that a step is told and its time limit
SHORTEST = 5  # a step that has less is not started
SECONDS_OF_STACKS = 3
# Its input ends when the caller does, even if that is killed.
GUARD = """
import contextlib, os, sys
sys.stdin.read()
with contextlib.suppress(ProcessLookupError):
    os.killpg(int(sys.argv[1]), 9)
"""


@dataclass(frozen=True)
class Step:
    """A command of Python with its time limit."""

    name: str  # for the log, the summary and ``--only``
    # Of Python; ``{seconds}`` in them becomes the deadline that it must keep
    arguments: Sequence[str]
    seconds: float  # its time limit, if so much is left
    prefix: Sequence[str] = ()  # program and options that run Python, such as compute-sanitizer
    environment: Mapping[str, str] = field(default_factory=dict)  # variables for this step alone
    # Its failure is reported but does not fail the run, because it is experimental
    optional: bool = False


def run_steps(
    steps: Sequence[Step], python: Path, out: Path, seconds: float
) -> tuple[list[str], list[str]]:
    """Run all steps within a total of seconds, even if some fail.

    The log is ``out/gpu.log``.

    Returns:
        names of the steps that failed, optional ones left out, and the lines of a summary.
    """
    deadline = time.monotonic() + seconds
    failed, summary = [], []
    with (out / "gpu.log").open("ab") as log:
        for step in steps:
            limit = min(step.seconds, deadline - time.monotonic())
            if limit < min(SHORTEST, step.seconds):
                outcome = "not run: no time is left"
                status = TIMED_OUT
            else:
                _write(log, f"\n== {step.name}: at most {limit:.0f} s\n".encode())
                begin = time.monotonic()
                status, last_line = run_step(step, python, log, limit)
                outcome = f"{describe(status)}, {time.monotonic() - begin:.0f} s: {last_line}"
            outcome = f"{step.name}{' (optional)' * step.optional}: {outcome}"
            _write(log, f"== {outcome}\n".encode())
            summary.append(outcome)
            if status and not step.optional:
                failed.append(step.name)
        _write(log, "\n".join(["", "== summary", *summary, ""]).encode())
    return failed, summary


def describe(status: int) -> str:
    if status == TIMED_OUT:
        return "timed out (exit 124)"
    return f"killed by signal {-status}" if status < 0 else f"exit {status}"


def run_step(step: Step, python: Path, log: IO[bytes], seconds: float) -> tuple[int, str]:
    """Return exit status (124: timeout) and last line of a step."""
    told = str(max(1, int(seconds - MARGIN)))
    arguments = [argument.replace("{seconds}", told) for argument in step.arguments]
    process = subprocess.Popen(
        [*step.prefix, str(python), *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **step.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD, str(process.pid)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    end = bytearray()
    copier = threading.Thread(target=_copy, args=(process.stdout, log, end), daemon=True)
    copier.start()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = TIMED_OUT
        _signal_group(process.pid, signal.SIGABRT)  # faulthandler prints the stacks of all threads
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_OF_STACKS)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        guard.communicate()
        copier.join(10)  # a process that has left the session may keep it open
    lines = end.decode(errors="replace").split("\n")
    return status, next((line.strip() for line in reversed(lines) if line.strip()), "")


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _copy(source: IO[bytes], log: IO[bytes], end: bytearray) -> None:
    """Copy a pipe to the log and to the screen; keep its end."""
    with source:
        while chunk := source.read1(2**16):
            end[:] = (end + chunk)[-2000:]
            _write(log, chunk)


def _write(log: IO[bytes], text: bytes) -> None:
    for stream in (log, sys.stdout.buffer):
        stream.write(text)
        stream.flush()
