"""Runs a script on two ranks at a time, whose interpreters exit normally: see test_teardown.py.

Ranks are forked from here, after the imports, and run to the end of this file, so that each
interpreter finalizes. (Those of tests.workers exit at once.)

    python interpreters.py SCRIPT FOLDER '[[argument, ...], ...]'

Each list of arguments is a run; FOLDER/<its index> then holds the output of each rank and the exit
statuses.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  creating an optimizer imports it

from pyparallel import gossip, topology  # noqa: F401  imported before forking

NUM_RANKS, RUNS_AT_ONCE, TIME_LIMIT = 2, 6, 60


def become(rank: int, folder: Path) -> None:
    """Set the environment as torchrun would, and redirect the output."""
    signal.alarm(TIME_LIMIT)
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ["INIT_METHOD"] = f"file://{folder}/store"


def fork_ranks(folder: Path) -> list[int]:
    """Fork the ranks and return their process ids; an empty list in a rank."""
    folder.mkdir()
    processes = []
    for rank in range(NUM_RANKS):
        process = os.fork()
        if not process:
            become(rank, folder)
            return []
        processes.append(process)
    return processes


def start_all(folder: Path, runs: list[list[str]]) -> list[str] | None:
    """Return its arguments in a rank; elsewhere None, once all have ended."""
    for first in range(0, len(runs), RUNS_AT_ONCE):
        started = {}
        for index, arguments in enumerate(runs[first : first + RUNS_AT_ONCE], start=first):
            started[index] = fork_ranks(folder / str(index))
            if not started[index]:
                return arguments
        for index, processes in started.items():
            statuses = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in processes]
            (folder / str(index) / "statuses").write_text(json.dumps(statuses))
    return None


script = Path(sys.argv[1])
chosen = start_all(Path(sys.argv[2]), json.loads(sys.argv[3]))
if chosen is not None:
    sys.argv[1:] = chosen
    exec(compile(script.read_text(), script, "exec"))
