"""What each algorithm waits for in a step, and what it averages: its calls of a clock."""

from collections.abc import Callable

import numpy as np

from ..gossip.algorithms.base import Periodic
from ..gossip.topology import Circulant, Topology
from .clock import Clock, Sent

Average = Callable[[int, slice], Sent]
"""Sends columns for the average of a number, which replaces them."""


class Steps:
    """The steps of an algorithm on all ranks; of this class, without any communication."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def before_update(self) -> None:
        """Do what comes between the gradient and the update."""

    def after_update(self) -> None:
        """Do what comes after the update."""

    def flush(self) -> None:
        """Wait for what is in flight."""


class Gradients(Steps):
    """Gradients are averaged over all ranks while they are computed."""

    def __init__(self, clock: Clock, num_bytes: float) -> None:
        super().__init__(clock)
        self._num_bytes = num_bytes

    def before_update(self) -> None:
        """Wait for the all-reduce of the last bucket."""
        self.clock.reduce_gradients(self._num_bytes, self.clock.num_ranks)

    def after_update(self) -> None:
        """Make all ranks equal."""
        self.clock.values[:] = self.clock.average(slice(None), self.clock.num_ranks)


class Rounds(Steps):
    """Push-sum rounds: of SGP, merged ``overlap`` steps later before the update, or of OSGP."""

    def __init__(
        self, clock: Clock, topology: Topology, num_bytes: float, overlap: int, encodes: bool,
        *, merges_after: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(clock)
        self._topology, self._num_bytes, self._overlap = topology, num_bytes, overlap
        self._encodes, self._merges_after = encodes, merges_after
        self._round = self._steps = self.num_merged = 0
        self._sent: Sent | None = None

    def before_update(self) -> None:
        """Merge a round that is due."""
        self._steps += 1
        if self._steps >= self._overlap and not self._merges_after:
            self.flush()

    def after_update(self) -> None:
        """Send a round, unless one is in flight."""
        if self._sent is None:
            self._send()
        elif self._merges_after and self._steps >= self._overlap:  # OSGP: sends, and then merges
            before, self._sent = self._sent, None
            self.clock.wait(before[0])  # whose memory the next message takes
            self._send()
            self.clock.receive(before)
            self.num_merged += 1
        if self._overlap == 0:
            self.flush()

    def flush(self) -> None:
        """Merge the round in flight."""
        if self._sent is not None:
            self.clock.receive(self._sent)
            self._sent = None
            self.num_merged += 1

    def _send(self) -> None:
        if self._encodes:
            self.clock.encode()
        self._steps, index = 0, self._topology.equivalent_round(self._round)
        self._round += 1
        if is_complete(self._topology, index) and not self._encodes:
            self._sent = self.clock.send_to_all(self._num_bytes)
        else:
            self._sent = self.clock.send(self._topology, index, self._num_bytes)


class Outer(Steps):
    """Local steps, and outer steps of each fragment, which travel for ``delay`` steps."""

    def __init__(
        self, clock: Clock, options: Periodic, interval: int, inner: Steps,
        send: Average,
    ) -> None:  # fmt: skip
        super().__init__(clock)
        self._options, self._inner, self._interval, self._send = options, inner, interval, send
        self._steps = 0
        self._sent: dict[int, tuple[int, Sent]] = {}

    def before_update(self) -> None:
        """Do what the inner algorithm does."""
        self._inner.before_update()

    def after_update(self) -> None:
        """Send fragments whose turn it is, and take outer steps that are due."""
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
                sent = self._send(count * fragments + number, slice(number, -1, fragments))
                self._sent[number] = self._steps, sent
            if number in self._sent and self._steps - self._sent[number][0] >= self._options.delay:
                self._take(number)

    def flush(self) -> None:
        """Take outer steps in flight."""
        self._inner.flush()
        for number in list(self._sent):
            self._take(number)

    def _take(self, number: int) -> None:
        _, (received, average, columns) = self._sent.pop(number)
        self.clock.wait(received)
        held, kept = self.clock.values[:, columns], self._options.share_kept
        weights = self.clock.values[:, -1:]
        self.clock.values[:, columns] = (1 - kept) * average * weights + kept * held


class Nodes(Steps):
    """All-reduce of gradients within a node, rounds of shards between nodes, then a broadcast."""

    def __init__(self, clock: Clock, group: int, num_bytes: float, inner: Rounds) -> None:
        super().__init__(clock)
        self._group, self._num_bytes, self._inner = group, num_bytes, inner

    def before_update(self) -> None:
        """Wait for the node's gradients, and merge."""
        self.clock.reduce_gradients(self._num_bytes, self._group)
        self._gather(self._inner.before_update)

    def after_update(self) -> None:
        """Make the ranks of a node equal, and send."""
        self.clock.values[:] = self.clock.average(slice(None), self._group)
        self._gather(self._inner.after_update)

    def flush(self) -> None:
        """Merge the round in flight."""
        self._gather(self._inner.flush)

    def _gather(self, act: Callable[[], None]) -> None:
        before = self._inner.num_merged
        act()
        if self._inner.num_merged > before:
            node = self.clock.now.reshape(-1, self._group).max(1).repeat(self._group)
            seconds = self.clock.all_reduce_seconds(self._num_bytes, self._group) / 2
            self.clock.wait(node + seconds)


def average_all(clock: Clock, num_bytes: float) -> Average:
    """Return what averages over all ranks, one average after the other."""
    ends = 0.0

    def send(index: int, columns: slice) -> Sent:
        nonlocal ends
        ends = clock.all_reduce(num_bytes, begin=ends)
        return np.full(clock.num_ranks, ends), clock.average(columns, clock.num_ranks), columns

    return send


def average_pairs(clock: Clock, num_bytes: float, topology: Topology) -> Average:
    """Return what averages over the pairs of a matching."""

    def send(index: int, columns: slice) -> Sent:
        held = clock.values[:, columns].copy()
        received, sent, _ = clock.send(
            topology, topology.equivalent_round(index), num_bytes, columns
        )
        average = clock.values[:, columns] + sent
        clock.values[:, columns] = held
        return received, average, columns

    return send


def is_complete(topology: Topology, index: int) -> bool:
    """Return whether all ranks send to all others in a round, which an all-reduce then adds."""
    others = topology.num_ranks - 1
    if isinstance(topology, Circulant):
        return 1 < others == len(topology.offsets(index))
    ranks = range(topology.num_ranks)
    return others > 1 and all(len(topology.out_peers(rank, index)) == others for rank in ranks)
