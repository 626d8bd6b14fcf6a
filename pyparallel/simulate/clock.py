"""The time at which each rank is, and the values that it holds, while an algorithm runs."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..gossip.topology import Edges, Topology
from .conditions import Stragglers
from .links import Links
from .profile import Profile

_CACHED_ROUNDS = 24  # of a topology: with a million ranks each holds 40 MB
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default

Sent = tuple[np.ndarray, np.ndarray, np.ndarray | slice]
"""When it has been received, (n,); what is added, (n, c); and of which columns."""


class Clock:
    """All ranks in one step after the other.

    A rank's time is a maximum over the ranks for whose messages it waits, so a round is a few
    operations on arrays of all ranks: no events are needed.

    Args:
        num_columns: the values that a rank holds, of each kind.

    Attributes:
        now: (n,) seconds.
        waited: (n,) seconds without computing, encoding or stepping.
        card_bytes: (machines,) bytes that each card has sent.
        values: (n, 2 c + 1); c columns begin with random values, the next c with zeros and change
            by a random value in each step. The last holds the push-sum weights.
    """

    def __init__(
        self,
        num_ranks: int,
        links: Links,
        profile: Profile,
        stragglers: Stragglers,
        seed: int,
        num_columns: int,
    ) -> None:
        self.num_ranks, self.links, self.profile = num_ranks, links, profile
        self._stragglers, self._seed, self._step = stragglers, seed, 0
        factors = links.computing(num_ranks)
        for rank, factor in stragglers.slow.items():
            factors[rank] *= factor
        self._computing = profile.computing * factors
        self.computed = self._computing  # (n,) seconds, in the last step
        self.now, self.waited = np.zeros(num_ranks), np.zeros(num_ranks)
        self.card_bytes = np.zeros(-(-num_ranks // links.ranks_per_machine))
        self._random = np.random.default_rng(seed)
        self.values = np.zeros((num_ranks, 2 * num_columns + 1))
        self.values[:, :num_columns] = self._random.standard_normal((num_ranks, num_columns))
        self.values[:, -1] = 1.0
        self._columns = num_columns
        self._round = lru_cache(_CACHED_ROUNDS)(self._round_of)
        self._all_reduce_seconds = lru_cache(_CACHED_ROUNDS)(links.all_reduce_seconds)

    def compute(self) -> None:
        """Let each rank compute its gradient."""
        self.computed = self._stragglers.draw(self._computing, self._seed, self._step)
        self.now = self.now + self.computed
        self._step += 1

    def update(self) -> None:
        """Let each rank's optimizer step, which changes its values at random."""
        self.now = self.now + self.profile.stepping
        shape = self.num_ranks, self._columns
        self.values[:, self._columns : -1] += self._random.standard_normal(shape)

    def encode(self) -> None:
        """Let each rank encode a message."""
        self.now = self.now + self.profile.encoding

    def wait(self, until: np.ndarray | float) -> None:
        """Let each rank wait until a time."""
        later = np.maximum(self.now, until)
        self.waited += later - self.now
        self.now = later

    def send(
        self,
        topology: Topology,
        index: int,
        num_bytes: float,
        columns: slice = slice(None),
    ) -> Sent:
        """Send the messages of a topology's round; each rank keeps the rest of its mass."""
        edges, seconds, num_crossing = self._round(topology, index, num_bytes)
        both = np.maximum(self.now[edges.senders], self.now[edges.receivers]) + seconds
        received = self.now.copy()
        np.maximum.at(received, edges.receivers, both)
        np.maximum.at(received, edges.senders, both)
        self.card_bytes += num_crossing * num_bytes
        held = self.values[:, columns]
        sent = edges.sent(held)
        self.values[:, columns] = edges.kept[:, None] * held
        return received, sent, columns

    def receive(self, sent: Sent) -> None:
        """Wait for the messages of a round, and add what they hold."""
        received, messages, columns = sent
        self.wait(received)
        self.values[:, columns] += messages

    def send_to_all(self, num_bytes: float) -> Sent:
        """Send to all others, by an all-reduce."""
        ends = np.full(self.num_ranks, self.all_reduce(num_bytes))
        kept = self.values / self.num_ranks
        sent = self.average(slice(None), self.num_ranks) - kept
        self.values[:] = kept
        return ends, sent, slice(None)

    def all_reduce(self, num_bytes: float, begin: float = 0.0) -> float:
        """Return when an all-reduce ends that begins at a time, or once all ranks are ready."""
        ready = max(float(self.now.max()), begin)
        return ready + self.all_reduce_seconds(num_bytes, self.num_ranks)

    def all_reduce_seconds(self, num_bytes: float, group: int, times: int = 1) -> float:
        """Return the seconds of one of several all-reduces in each group; count what they send."""
        if group > self.links.ranks_per_machine:  # a ring leaves each machine once
            self.card_bytes += times * 2 * num_bytes * (group - 1) / group
        return self._all_reduce_seconds(num_bytes, self.num_ranks, group)

    def average(self, columns: slice, group: int) -> np.ndarray:
        """Return the means over the ranks of each group."""
        held = self.values[:, columns]
        means = held.reshape(-1, group, held.shape[1]).mean(1)
        found: np.ndarray = means.repeat(group, 0)
        return found

    def reduce_gradients(self, num_bytes: float, group: int) -> None:
        """Average gradients in each group, buckets of them during backward, equal in size."""
        buckets = max(1, round(num_bytes / BUCKET_BYTES))
        forward = self.profile.forward_share * self.computed
        begin = self.now - self.computed
        seconds = self.all_reduce_seconds(num_bytes / buckets, group, buckets)
        # A group is ready for bucket b at a maximum of functions linear in b: convex, so that what
        # follows its first or its last bucket is the longest.
        first = begin + forward + (self.computed - forward) / buckets
        ends = np.maximum(_of_groups(first, group) + buckets * seconds,
                          _of_groups(self.now, group) + seconds)  # fmt: skip
        self.wait(ends.repeat(group) if group > 1 else self.now)

    def distances(self) -> tuple[float, float]:
        """Return the rms distance from the mean of the first columns, and of those that change."""
        debiased = self.values[:, :-1] / self.values[:, -1:]
        mean = self.values[:, :-1].mean(0) / self.values[:, -1].mean()
        squares = ((debiased - mean) ** 2).mean(0)
        kinds: Sequence[np.ndarray] = (squares[: self._columns], squares[self._columns :])
        first, second = (float(np.sqrt(each.mean())) for each in kinds)
        return first, second

    def _round_of(
        self, topology: Topology, index: int, num_bytes: float
    ) -> tuple[Edges, np.ndarray, np.ndarray]:
        edges = topology.round_edges(index)
        machines = self.links.machine_of(edges.senders)
        crosses = machines != self.links.machine_of(edges.receivers)
        num_crossing = np.bincount(machines[crosses], minlength=len(self.card_bytes))
        return edges, self.links.seconds(edges, num_bytes, self.num_ranks), num_crossing


def _of_groups(values: np.ndarray, group: int) -> np.ndarray:
    found: np.ndarray = values.reshape(-1, group).max(1)
    return found
