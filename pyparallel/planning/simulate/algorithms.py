"""What each algorithm waits for in a step, and what it averages: its calls of a clock."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial

from typing_extensions import override

from ...gossip.algorithms.base import Periodic
from ...gossip.topology import Circulant, Topology
from .clock import Clock, Sent
from .cost import Cost
from .training import OuterSteps

Average = Callable[[int, slice], Sent]
"""Sends columns of values for the average of a number; what arrives is the average itself."""


class Steps:
    """The steps of an algorithm on all ranks; of this class, without communication."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_merged = 0

    def before_update(self) -> None:
        """Do what comes between the gradient and the update."""

    def after_update(self) -> None:
        """Do what comes after the update."""

    def flush(self) -> None:
        """Wait for what is in flight."""


class Gradients(Steps):
    """Gradients are averaged in groups of ranks while they are computed; at a measured cost."""

    def __init__(
        self, clock: Clock, num_bytes: float, group: int, cost: Cost | None = None
    ) -> None:
        super().__init__(clock)
        self._num_bytes, self._group, self._cost = num_bytes, group, cost

    @override
    def before_update(self) -> None:
        self.clock.reduce_gradients(self._num_bytes, self._group, self._cost)

    @override
    def after_update(self) -> None:
        self.clock.values[:] = self.clock.average(slice(None), self._group)


class Nodes(Gradients):
    """Gradients are averaged in a node, which then sends shards, and gathers what it receives."""

    def __init__(self, clock: Clock, num_bytes: float, group: int, inner: Steps) -> None:
        super().__init__(clock, num_bytes, group)
        self._inner = inner

    @override
    def before_update(self) -> None:
        super().before_update()
        self._gather_after(self._inner.before_update)

    @override
    def after_update(self) -> None:
        super().after_update()
        self._gather_after(self._inner.after_update)

    @override
    def flush(self) -> None:
        self._gather_after(self._inner.flush)

    def _gather_after(self, act: Callable[[], None]) -> None:
        before = self._inner.num_merged
        act()
        if self._inner.num_merged > before:
            seconds = self.clock.all_reduce_seconds(self._num_bytes / 2, self._group)
            self.clock.wait(self.clock.latest(self.clock.now, self._group) + seconds)


class Rounds(Steps):
    """Push-sum rounds, merged ``overlap`` steps later: before an update, or as OSGP's after it."""

    def __init__(
        self, clock: Clock, topology: Topology, num_bytes: float, overlap: int, *,
        encodes: bool = False, merges_after: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(clock)
        self._topology, self._num_bytes, self._overlap = topology, num_bytes, overlap
        self._encodes, self._merges_after = encodes, merges_after
        self._is_complete = cache(partial(is_complete, topology))
        self._round = self._steps = 0
        self._sent: Sent | None = None

    @override
    def before_update(self) -> None:
        self._steps += 1
        if self._steps >= self._overlap and not self._merges_after:
            self.flush()

    @override
    def after_update(self) -> None:
        if self._sent is None:
            self._sent = self._send()
        elif self._merges_after and self._steps >= self._overlap:
            self.clock.wait(self._sent[0])  # then its memory is free for the next message
            following = self._send()
            self.flush()
            self._sent = following
        if self._overlap == 0:
            self.flush()

    @override
    def flush(self) -> None:
        if self._sent is not None:
            received, messages, columns = self._sent
            self.clock.wait(received)
            self.clock.values[:, columns] += messages
            self._sent, self.num_merged = None, self.num_merged + 1

    def _send(self) -> Sent:
        if self._encodes:
            self.clock.encode()
        self._steps, index = 0, self._topology.equivalent_round(self._round)
        self._round += 1
        if self._is_complete(index) and not self._encodes:
            return self.clock.send_to_all(self._num_bytes)
        return self.clock.send(self._topology, index, self._num_bytes, slice(None))


class Outer(Steps):
    """Local steps, and outer steps of each fragment, which travel for ``delay`` steps."""

    def __init__(
        self, clock: Clock, options: Periodic, interval: int, inner: Steps, average: Average
    ) -> None:
        super().__init__(clock)
        self._options, self._inner, self._interval = options, inner, interval
        self._average, self._steps = average, 0
        self._sent: dict[int, tuple[int, Sent]] = {}  # with the step, by fragment
        self._trained: list[OuterSteps] = []  # by fragment
        if clock.training is not None:
            numbers = range(options.num_fragments)
            self._trained = [OuterSteps(options, clock.training, number) for number in numbers]

    @override
    def before_update(self) -> None:
        self._inner.before_update()

    @override
    def after_update(self) -> None:
        self._inner.after_update()
        self._steps += 1
        fragments = self._options.num_fragments
        for number in range(fragments):
            first = (number + 1) * self._interval // fragments
            count, rest = divmod(self._steps - first, self._interval)
            if not rest and count >= 0:
                self._inner.flush()
                if self._options.compressor is not None:
                    self.clock.encode()
                with self._trained[number].sending() if self._trained else nullcontext():
                    columns = slice(number, -1, fragments)
                    sent = self._average(count * fragments + number, columns)
                self._sent[number] = self._steps, sent
            if number in self._sent and self._steps - self._sent[number][0] >= self._options.delay:
                self._take(number)

    @override
    def flush(self) -> None:
        self._inner.flush()
        for number in list(self._sent):
            self._take(number)

    def _take(self, number: int) -> None:
        _, (received, average, columns) = self._sent.pop(number)
        self.clock.wait(received)
        values, kept = self.clock.values, self._options.share_kept
        new = (1 - kept) * average * values[:, -1:]  # of the push-sum weight of an inner algorithm
        if self._trained:
            own = self._trained[number].columns
            new[:, own] = (1 - kept) * self._trained[number].step(average[:, own])
        values[:, columns] = new + kept * values[:, columns]


def average_all(clock: Clock, num_bytes: float, times: float = 1) -> Average:
    """Return what averages over all ranks by all-reduces, one average after the other."""
    ends = 0.0

    def send(index: int, columns: slice) -> Sent:
        nonlocal ends
        ends = clock.all_reduce(num_bytes, begin=ends, times=times)
        return ends, clock.average(columns, clock.num_ranks), columns

    return send


def average_pairs(clock: Clock, num_bytes: float, topology: Topology) -> Average:
    """Return what averages over the pairs of a matching."""

    def send(index: int, columns: slice) -> Sent:
        held = clock.values[:, columns].copy()
        of_round = topology.equivalent_round(index)
        received, messages, _ = clock.send(topology, of_round, num_bytes, columns)
        average = clock.values[:, columns] + messages
        clock.values[:, columns] = held
        return received, average, columns

    return send


def is_complete(topology: Topology, index: int) -> bool:
    """Return whether all ranks send equal shares to all others, which an all-reduce then adds."""
    if isinstance(topology, Circulant):
        return 1 < topology.num_ranks - 1 == len(topology.offsets(index))
    return topology.neighbors(0, index).is_complete
