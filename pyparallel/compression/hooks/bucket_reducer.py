"""Averages buckets of gradients in order, over a process group of its own."""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ...comm.collectives import Collectives
from ...comm.comm_stats import CommStats
from ..layout import BufferLayout
from ..state_store import StateStore
from .comm_worker import CommWorker, comm_worker_for


class BucketReducer:
    """Averages buckets in order in the background; skips those after a failure.

    Args:
        group: a process group that nothing else uses.
        store: compressor and states.
        lock: held while ``store`` is used.
    """

    def __init__(self, group: dist.ProcessGroup, store: StateStore, lock: threading.Lock) -> None:
        self.collectives = Collectives(group)
        self.failure: Exception | None = None
        self._store = store
        self._lock = lock
        self._worker: CommWorker | None = None
        self._last: Future[Tensor] | None = None

    def start(
        self, gradients: Tensor, layout: BufferLayout, then: Callable[[], None] | None
    ) -> Future[Tensor]:
        """Average a bucket in the background.

        Args:
            gradients: (numel,) gradients of the bucket. Written.
            layout: their parameters.
            then: called afterwards; the future raises what it raises.
        """
        self._worker = self._worker or comm_worker_for(gradients.device)

        def job() -> None:
            self._reduce(gradients, layout)
            if then:
                then()

        self._last = self._worker.start(job, gradients)
        return self._last

    def wait(self) -> None:
        """Wait for the last bucket."""
        if self._last is not None:
            self._last.wait()

    def take_stats(self) -> CommStats:
        """Return bytes and seconds since the last call."""
        stats, self.collectives.stats = self.collectives.stats, CommStats()
        return stats

    @torch.no_grad()
    def mean_(self, gradients: Tensor, layout: BufferLayout) -> None:
        """Average a bucket; the caller waits."""
        with self._lock:
            state = self._store.of(layout, gradients.device)
        self._store.compressor.mean_(gradients, state, self.collectives)

    def _reduce(self, gradients: Tensor, layout: BufferLayout) -> None:
        """Average a bucket; skip it after a failure, when other ranks may be in its collectives."""
        if self.failure is None:
            try:
                self.mean_(gradients, layout)
            except Exception as error:
                self.failure = error
