"""Where buckets are averaged while the backward pass goes on."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future


class Background(Protocol):
    """Runs jobs one after another, in the order in which they come."""

    def start(self, job: Callable[[], None], result: Tensor) -> Future[Tensor]:
        """Let a job run, after which ``result`` is what the future gives."""


def background_for(device: torch.device) -> Background:
    """A stream on GPUs; elsewhere a thread, since there the caller of a collective waits for it."""
    return Stream(device) if device.type == "cuda" else Thread()


class Thread:
    """One thread: all ranks start their collectives in one order."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pyparallel-compression")

    def start(self, job: Callable[[], None], result: Tensor) -> Future[Tensor]:
        """As `Background.start`. What the job raises, waiting for the future raises again."""
        done: Future[None] = Future()
        running = self._executor.submit(job)

        def read(_: Future[None]) -> Tensor:
            running.result()
            return result

        given = done.then(read)
        running.add_done_callback(lambda _: done.set_result(None))
        return given


class Stream:
    """One stream of a GPU: nothing waits on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, job: Callable[[], None], result: Tensor) -> Future[Tensor]:
        """As `Background.start`. What the job raises, this raises."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        given: Future[Tensor] = Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            result.record_stream(self._stream)
            job()
            given.set_result(result)
        return given
