"""Workers that average buckets while the backward pass runs."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.futures import Future


class ThreadWorker:
    """A worker thread, so that all ranks start their collectives in the same order.

    It ends with this object. Unlike with an executor, process exit waits for no job: a job may wait
    for a rank that is gone or that waits for this one.
    """

    def __init__(self) -> None:
        self._triggers: SimpleQueue[Future[None] | None] = SimpleQueue()
        threading.Thread(
            target=_complete_each,
            args=(self._triggers,),
            name="pyparallel-compression",
            daemon=True,
        ).start()
        weakref.finalize(self, self._triggers.put, None)

    def start(self, job: Callable[[], None], result: Tensor) -> Future[Tensor]:
        """Start a job; ``wait()`` on the future raises what the job raised."""
        trigger: Future[None] = Future()

        def run(_: Future[None]) -> Tensor:
            job()
            return result

        future = trigger.then(run)
        self._triggers.put(trigger)
        return future


def _complete_each(futures: "SimpleQueue[Future[None] | None]") -> None:
    """Complete each future in turn; its ``then`` callback runs in this thread."""
    for future in iter(futures.get, None):
        future.set_result(None)
        del future  # releases what its job holds


class CudaStreamWorker:
    """A CUDA stream; the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, job: Callable[[], None], result: Tensor) -> Future[Tensor]:
        """Run a job on the stream; raises what the job raises."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        future: Future[Tensor] = Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            result.record_stream(self._stream)
            job()
            future.set_result(result)
        return future


CommWorker = ThreadWorker | CudaStreamWorker
"""Runs jobs in order: ``start(job, result)`` returns a future of ``result`` that completes then."""


def comm_worker_for(device: torch.device) -> CommWorker:
    """Return a stream worker on GPUs, else a thread, since CPU collectives block their caller."""
    return CudaStreamWorker(device) if device.type == "cuda" else ThreadWorker()
