"""Workers that average buckets while the backward pass runs."""

import threading
import weakref
from collections.abc import Callable
from itertools import cycle
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future


def once(job: Callable[[], None], result: Tensor) -> Callable[[Future[Any]], Tensor]:
    """Return a callback of a future that runs a job once, and releases it before it returns.

    The thread that has completed a future still holds its callbacks when a wait has ended; were one
    the last to hold a process group, it would destroy it: see ``comm/process_groups.py``.
    """
    jobs = [job]
    del job

    def run(_: Future[Any]) -> Tensor:
        jobs.pop()()
        return result

    return run


class ThreadWorker:
    """A worker thread, so that all ranks start their collectives in the same order.

    It ends with this object; process exit waits for no job, which may wait for a rank that is gone.
    """

    def __init__(self) -> None:
        self._triggers: SimpleQueue[Future[None] | None] = SimpleQueue()
        threading.Thread(
            target=_complete_each,
            args=(self._triggers,),
            name="pyparallel-compression",
            daemon=True,
        ).start()
        weakref.finalize(self, self._triggers.put, None).atexit = False  # it ends with the process

    def start(self, job: Callable[[], None], result: Tensor) -> Future[Tensor]:
        """Start a job; ``wait()`` on the future raises what the job raised."""
        trigger: Future[None] = Future()
        future = trigger.then(once(job, result))
        self._triggers.put(trigger)
        return future


def _complete_each(futures: "SimpleQueue[Future[None] | None]") -> None:
    """Complete each future in turn; its ``then`` callback runs in this thread."""
    for future in iter(futures.get, None):
        future.set_result(None)
        del future


class CudaStreamWorker:
    """Two CUDA streams that take turns, as a job is encoded while the one before is sent.

    Of high priority: the kernels of a job are short, and communication waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = cycle([torch.cuda.Stream(device, priority=-1) for _ in range(2)])

    def start(self, job: Callable[[], None], result: Tensor) -> Future[Tensor]:
        """Run a job on the next stream; raises what the job raises."""
        stream = next(self._streams)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        future: Future[Tensor] = Future(devices=[self._device])
        with torch.cuda.stream(stream):
            result.record_stream(stream)
            job()
            future.set_result(result)
        return future


CommWorker = ThreadWorker | CudaStreamWorker
"""Starts jobs in order: ``start(job, result)`` returns a future that completes with ``result``."""


def comm_worker_for(device: torch.device) -> CommWorker:
    """Return a stream worker on GPUs, else a thread, since CPU collectives block their caller."""
    return CudaStreamWorker(device) if device.type == "cuda" else ThreadWorker()
