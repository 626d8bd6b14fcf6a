"""Ctrl-C, as a user presses it: it goes to the launcher and to every rank."""

import os
import signal
import subprocess
import time

import pytest


def assert_ctrl_c_ends_all(command, environment, shown):
    """Press it a second after ``shown`` is on the screen."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        start_new_session=True,
    )  # fmt: skip
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
