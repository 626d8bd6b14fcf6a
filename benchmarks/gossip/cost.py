"""The cost of a round outside communication, compared with its ``mix_`` calls alone."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gossip.models import Compute
from benchmarks.gossip.trainers import BUCKET_BYTES
from benchmarks.harness.turns import take_turns
from pyparallel.comm import Run
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.push_sum import DenseBuffer, PushSum
from pyparallel.gossip.topology import OnePeerExponential
from pyparallel.ops import mix_
from pyparallel.training import FlatBuckets

MIX_ALONE = "its mix_ calls alone"


@dataclass
class Clock:
    """Seconds spent in communication, including waits."""

    seconds: float = 0.0

    def call(self, function: Any, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.seconds += time.perf_counter() - begin


class TimedPendingExchange:
    """A pending exchange whose waits count as communication."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def wait_for_headers(self) -> None:
        self._clock.call(self._inner.wait_for_headers)

    def wait(self) -> None:
        self._clock.call(self._inner.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TimedExchange(NeighborExchange):
    """An exchange whose start counts as communication: gloo begins to copy to sockets there."""

    def __init__(self, run: Run, clock: Clock) -> None:
        super().__init__(run)
        self._clock = clock

    def start(self, *arguments: Any) -> Any:
        pending = self._clock.call(super().start, *arguments)
        return TimedPendingExchange(pending, self._clock)


def measure(rank: int, compute: Compute, turns: int, pause: float) -> dict[str, list[float]]:
    def settle() -> None:
        dist.barrier()
        time.sleep(pause)  # the other rank's threads have left the barrier

    runs = {
        "round, overlap 0 or 1": RoundCost(compute, pause, snapshot=False).run,
        "round, overlap above 1": RoundCost(compute, pause, snapshot=True).run,
        MIX_ALONE: MixCost(compute).run,
    }
    return take_turns(runs, turns, before=settle)


class RoundCost:
    """Rounds with enough time between ``send`` and ``merge`` for messages to arrive."""

    def __init__(self, compute: Compute, pause: float, *, snapshot: bool) -> None:
        self._clock = Clock()
        exchange: Any = TimedExchange(Run(), self._clock)
        graph = OnePeerExponential(dist.get_world_size())
        buffers = [DenseBuffer(b, exchange, snapshot=snapshot) for b in make_buffers(compute)]
        self._averaging = PushSum(buffers, exchange, graph)
        self._pause = pause

    def run(self) -> float:
        """Return the seconds of a round outside communication."""
        self._clock.seconds = 0.0
        begin = time.perf_counter()
        self._averaging.send()
        self._clock.call(time.sleep, self._pause)
        self._averaging.merge()
        return time.perf_counter() - begin - self._clock.seconds


class MixCost:
    """The ``mix_`` calls of such a round: as many calls on as many elements."""

    def __init__(self, compute: Compute) -> None:
        self._buffers = make_buffers(compute)
        self._messages = [torch.zeros_like(buffer) for buffer in self._buffers]
        self._masses = torch.full((1,), 0.5, dtype=torch.float64)

    def run(self) -> float:
        weights = [torch.tensor(0.5, dtype=torch.float64) for _ in self._buffers]
        begin = time.perf_counter()
        for buffer, weight, message in zip(self._buffers, weights, self._messages, strict=True):
            mix_(buffer, weight, [message], self._masses)
        return time.perf_counter() - begin


def make_buffers(compute: Compute) -> Sequence[Tensor]:
    return FlatBuckets(compute.build().parameters(), BUCKET_BYTES).buffers
