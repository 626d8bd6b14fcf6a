"""Gloo ranks as processes forked from a warm server, with a time limit and logged stack traces."""

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
# Creating an optimizer imports torch._dynamo: a second per process unless preloaded.
_CONTEXT.set_forkserver_preload(["pyparallel", "torch._dynamo"])


@dataclass(frozen=True)
class Outcome:
    """The result of a rank: its function's return value, or the error it raised."""

    value: Any
    error: str | None
    exit_code: int | None
    log: str


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, time_limit: float = 90
) -> list[Any]:
    """Return function(rank, *arguments) of each rank of a gloo group; all must succeed."""
    outcomes = observe_ranks(num_ranks, function, *arguments, time_limit=time_limit)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error]
    report = "\n".join(f"--- rank {r}: {outcomes[r].error}\n{outcomes[r].log}" for r in failed)
    assert not failed, f"ranks {failed} of {num_ranks} failed\n{report}"
    return [outcome.value for outcome in outcomes]


def observe_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    time_limit: float = 90,
    group_timeout: float = 60,
) -> list[Outcome]:
    """Run as `run_ranks`, for tests in which ranks may fail."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run_rank,
                args=(rank, num_ranks, folder, sender, time_limit, group_timeout),
                kwargs={"function": function, "arguments": arguments},
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        deadline = (
            time.monotonic() + time_limit + 10
        )  # after a rank's own limit, which prints its stacks
        return [
            _outcome(pipe, process, Path(folder, f"log-{rank}"), deadline)
            for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True))
        ]


def _outcome(pipe: Any, process: Any, log: Path, deadline: float) -> Outcome:
    value, error = None, "ended without a result (killed, or its time limit: see the stacks)"
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            value, error = pickle.loads(pipe.recv_bytes())
    except EOFError:
        pass  # the rank died: the error is set above
    process.join(max(0.0, deadline - time.monotonic()))
    process.kill()  # a stopped process does not enforce its own limit
    process.join()
    return Outcome(value, error, process.exitcode, log.read_text() if log.exists() else "")


def _run_rank(
    rank: int,
    num_ranks: int,
    folder: str,
    sender: Any,
    time_limit: float,
    group_timeout: float,
    *,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    log = os.open(Path(folder, f"log-{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(time_limit, exit=True, file=sys.__stderr__)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=group_timeout),
    )
    store_barrier()  # a rank that finishes at once must not exit while others connect
    try:
        _send(sender, function(rank, *arguments), None)
    except BaseException as error:
        traceback.print_exc()
        _send(sender, None, f"{type(error).__name__}: {error}")
        sys.exit(1)
    dist.destroy_process_group()


def store_barrier(name: str = "connected") -> None:
    """Wait for all ranks through the store, whose entries outlive a rank that dies afterwards.

    A collective barrier does not do before a death: a rank that has left it may disconnect others
    still in it.
    """
    store = dist.group.WORLD.get_group_store()
    store.set(f"{name}/{dist.get_rank()}", "")
    store.wait([f"{name}/{rank}" for rank in range(dist.get_world_size())])


def _send(sender: Any, value: Any, error: str | None) -> None:
    # By value: Connection.send shares tensors' memory, which is freed when the rank exits.
    sender.send_bytes(pickle.dumps((value, error)))
