"""PushSum in the order of Overlap SGP: update, send, then merge what was sent before."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from ...comm import PeerError, without_traceback
from ..topology import Neighbors
from .dense_buffer import BiasedBuffer, DenseBuffer
from .push_sum import PushSum


class DelayedPushSum(PushSum):
    """PushSum whose rounds are merged after the next one has been sent.

    Every ``delay`` steps, at least 1, after the update, a rank sends a copy of z, and w, and then
    averages with the messages sent ``delay`` steps before. One message at least is always in
    flight, so weights are below 1, and the optimizer steps on the numerator. Arguments are those of
    ``PushSum``, with dense buffers.
    """

    _round_buffers: Sequence[DenseBuffer]

    @override
    def before_step(self) -> None:
        self._begin_step()

    @override
    def after_step(self) -> None:
        if self._is_due:
            index, neighbors = self._next_round()
            with self._keeping_failures():
                for buffer in self._round_buffers:
                    buffer.send_and_merge(neighbors, index)
            self._complete(index)

    @override
    def step_buckets(self, step_bucket: Callable[..., None], num_buckets: int) -> None:
        self._steps_in_flight += 1
        sends = self.run.counts.synchronizes and self._is_due
        index, neighbors = self._next_round()
        failure = None if self._failure is None else without_traceback(self._failure)
        for i, buffer in enumerate(self._round_buffers):
            copies = sends and failure is None
            if copies:
                try:
                    buffer.wait()  # for the last message also: its copy is written again
                except PeerError as error:
                    failure, copies = error, False
            buffer.step(partial(step_bucket, i), merges=False, sends=copies)
            if copies:
                try:
                    buffer.send_and_merge(neighbors, index)
                except PeerError as error:
                    failure = error
        if failure is not None:
            self._failure = without_traceback(failure)
            raise failure
        if sends:
            self._complete(index)

    @override
    def _mass_of(self, state: dict[str, Any]) -> float:
        return 1.0 if isinstance(self._round_buffers[0], BiasedBuffer) else super()._mass_of(state)

    @property
    def _is_due(self) -> bool:
        return not self._in_flight or self._steps_in_flight >= self._overlap

    def _next_round(self) -> tuple[int, Neighbors]:
        """Return the round to send, and its neighbors; weights differ from those of a round."""
        index = self.round_index + self._in_flight
        return index, replace(self._neighbors_of(index), in_masses=())

    def _complete(self, round_index: int) -> None:
        if round_index > self.round_index:  # not in the first round, which merges nothing
            self._staleness = self._steps_in_flight
        self.round_index = round_index
        self._steps_in_flight = 0
        self.exchange.headers.raise_nonfinite()
