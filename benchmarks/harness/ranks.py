"""Gloo processes of one measurement, each with one compute thread and a time limit."""

import datetime
import faulthandler
import multiprocessing
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.link import Rendezvous, loopback

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pyparallel", "torch._dynamo"])
GROUP_TIMEOUT = datetime.timedelta(seconds=60)


def run_ranks(
    num_ranks: int, place: Rendezvous, seconds: float, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Return the result of function(rank, *arguments) on every rank.

    A rank that exceeds the time limit in seconds prints its stacks and exits.

    Raises:
        RuntimeError: a rank failed; the others are killed.
    """
    pipes, processes = [], []
    try:
        for rank in range(num_ranks):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            work = partial(function, rank, *arguments)
            of_rank = (rank, num_ranks, place, seconds, sender, work)
            process = _CONTEXT.Process(target=_run_rank, args=of_rank)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        answers = _collect(pipes, time.monotonic() + seconds + 10)  # after the ranks' own limit
        for process in processes:
            process.join(30)
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_on_loopback(
    num_ranks: int, seconds: float, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    with loopback() as place:
        return run_ranks(num_ranks, place, seconds, function, *arguments)


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    answers: dict[Connection, Any] = {}
    while len(answers) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in answers], deadline - time.monotonic())
        if not ready:
            missing = [rank for rank, pipe in enumerate(pipes) if pipe not in answers]
            raise RuntimeError(f"ranks {missing} exceeded the time limit")
        errors = []  # of all ranks: the first may only report that another has failed
        for pipe in ready:
            try:
                answers[pipe], error = pipe.recv()
            except EOFError:
                error = "ended without a result"
            if error:
                errors.append(f"rank {pipes.index(pipe)}: {error}")
        if errors:
            raise RuntimeError("\n".join(errors))
    return [answers[pipe] for pipe in pipes]


def _run_rank(
    rank: int, num_ranks: int, place: Rendezvous, seconds: float, sender: Connection, work: partial
) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True)
    place.enter(rank)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        store = f"tcp://{place.host}:{place.port}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=GROUP_TIMEOUT
        )
        answer = work()
        dist.barrier()  # rank 0 holds the store, so it must leave last
        dist.destroy_process_group()
        sender.send((answer, None))
    except Exception:  # raised by the caller
        sender.send((None, traceback.format_exc()))
