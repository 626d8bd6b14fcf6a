"""Where buckets are averaged while the backward pass goes on."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future


class CommWorker(Protocol):
    """Runs jobs one after another, in the order in which they come."""

    def start(self, job: Callable[[], None], result: Tensor) -> Future[Tensor]:
        """Let a job run, after which ``result`` is what the future gives."""


def comm_worker_for(device: torch.device) -> CommWorker:
    """A stream on GPUs; elsewhere a thread, since there the caller of a collective waits for it."""
    return CudaStreamWorker(device) if device.type == "cuda" else ThreadWorker()


class ThreadWorker:
    """One thread: all ranks start their collectives in one order.

    It ends with this object. A process that ends before waits for no job, unlike with an executor:
    a job may wait for a rank that is gone, or that waits for this one.
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
        """As `CommWorker.start`. What the job raises, waiting for the future raises again."""
        trigger: Future[None] = Future()

        def run(_: Future[None]) -> Tensor:
            job()
            return result

        future = trigger.then(run)
        self._triggers.put(trigger)
        return future


def _complete_each(futures: "SimpleQueue[Future[None] | None]") -> None:
    """What follows a future runs in the thread that completes it."""
    for future in iter(futures.get, None):
        future.set_result(None)
        del future  # with all that its job holds


class CudaStreamWorker:
    """One stream of a GPU: nothing waits on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, job: Callable[[], None], result: Tensor) -> Future[Tensor]:
        """As `CommWorker.start`. What the job raises, this raises."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        future: Future[Tensor] = Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            result.record_stream(self._stream)
            job()
            future.set_result(result)
        return future
