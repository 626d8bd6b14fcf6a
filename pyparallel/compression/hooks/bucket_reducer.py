"""Averages buckets of gradients over a process group of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ...comm import Run
from ...comm.collectives import Collectives
from ...comm.profiling import profiled, profiled_start
from ...comm.stats import CommStats
from ...training.nonfinite import NonFinitePolicy, first_nonfinite, is_finite
from ..layout import BufferLayout
from ..nonfinite import NonFiniteCheck, raise_of_means
from ..quantizers.cast import Cast
from ..state_store import StateStore
from .comm_worker import CommWorker, comm_worker_for, once

AVERAGE = "pyparallel::average_bucket"


class BucketReducer:
    """Averages buckets in the background; skips those after a failure; has its ``run`` alone."""

    def __init__(self, run: Run, store: StateStore, nonfinite: NonFinitePolicy) -> None:
        self.collectives = Collectives(run)
        self.nonfinite = NonFiniteCheck(nonfinite)
        self.failure: Exception | None = None
        self._store = store
        self._worker: CommWorker | None = None
        self._num_started = 0
        # Of means that are not finite: the bucket's number and parameters, and which is this rank's
        # first that is not finite, or -1.
        self._nonfinite_means: list[tuple[int, BufferLayout, int]] = []

    def start(
        self, gradients: Tensor, layout: BufferLayout, then: Callable[[], None] | None
    ) -> Future[Tensor]:
        """Average gradients (numel,) in place in the background, then call ``then``."""
        compressor = self._store.compressor
        # One collective, which needs no worker to wait for it.
        if gradients.is_cpu and isinstance(compressor, Cast) and compressor.starts_means:
            return profiled_start(AVERAGE, self._start_mean, compressor, gradients, layout, then)
        self._worker = self._worker or comm_worker_for(gradients.device)
        job = partial(self.mean_, gradients, layout, then)
        if gradients.is_cpu:
            return profiled_start(AVERAGE, self._worker.start, job, gradients)
        with profiled(AVERAGE):
            return self._worker.start(job, gradients)

    def mean_(
        self, gradients: Tensor, layout: BufferLayout, then: Callable[[], None] | None
    ) -> None:
        """Average a bucket, then call ``then``; the caller waits."""
        collectives, compressor = self.collectives, self._store.compressor
        state_of = partial(self._store.of, layout, gradients.device)
        given = compressor, gradients, layout, state_of, collectives, collectives.run.counts.steps
        self._attempt(self.nonfinite.mean_, *given)
        if then:
            then()

    def end_step(self) -> None:
        """Raise for the means of a step, all of which have ended."""
        found, self._nonfinite_means = sorted(self._nonfinite_means, key=lambda each: each[0]), []
        self._num_started = 0
        if found:  # the same on all ranks
            layouts, pieces = [layout for _, layout, _ in found], [piece for _, _, piece in found]
            self._attempt(raise_of_means, layouts, pieces, self.collectives)

    def take_stats(self) -> CommStats:
        """Return bytes and seconds since the last call."""
        stats, self.collectives.stats = self.collectives.stats, CommStats()
        return stats

    def _start_mean(
        self,
        compressor: Cast,
        gradients: Tensor,
        layout: BufferLayout,
        then: Callable[[], None] | None,
    ) -> Future[Tensor]:
        """Start a bucket's only collective at once: gloo's threads are the workers."""
        started: list[tuple[Future[Any], Callable[[Callable[[Tensor], None]], None]]] = []
        number, self._num_started = self._num_started, self._num_started + 1

        def start() -> None:
            if self.nonfinite.policy == "skip":
                self.nonfinite.apply_(gradients, layout, self.collectives, None)
            state = self._store.of(layout, gradients.device)
            started.append(compressor.start_mean_(gradients, state, self.collectives))

        def inspect(mean: Tensor) -> None:
            if self.nonfinite.policy == "raise" and not is_finite(mean):
                piece = first_nonfinite(layout.split(gradients))
                self._nonfinite_means.append((number, layout, piece))

        def complete() -> None:
            for _, finish in started:
                self._attempt(finish, inspect)
            if then:
                then()

        self._attempt(start)
        if started:
            return started[0][0].then(once(complete, gradients))
        skipped: Future[Any] = Future()
        skipped.set_result(None)
        return skipped.then(once(complete, gradients))

    @torch.no_grad()
    def _attempt(self, job: Callable[..., object], *arguments: Any) -> None:
        """Run a job; skip it after a failure, when other ranks may be in its collectives."""
        if self.failure is None:
            try:
                job(*arguments)
            except Exception as error:
                self.failure = error
