"""The time at which each rank is, and the values that it holds, while an algorithm runs."""

from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from ..gossip.topology import Edges, Topology
from .conditions import Stragglers
from .cost import Cost
from .links import Links
from .objectives import Objective
from .profile import Profile
from .training import Training

_CACHED_ROUNDS = 24  # of a topology: with a million ranks each takes 40 MB
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default

Sent = tuple[np.ndarray | float, np.ndarray, slice]
"""When each rank has received what was sent, (n,), what that is, (n, c), and of which columns."""


class Clock:
    """All ranks in one step after the other.

    A rank waits for the maximum over the messages of a round, so a round is a few operations on
    arrays of all ranks, and no events are needed.

    Args:
        num_columns: c, of each kind of values.
        objective: on which ranks train d parameters; None: they do not, and d is 0.
        is_biased: see ``Training``.

    Attributes:
        now: (n,) seconds.
        waited: (n,) seconds without computing, encoding or stepping.
        card_bytes: (machines,) that each card has sent.
        values: (n, 2 c + d + 1); c columns are random at first and then only mixed, the next c
            begin as zeros and change at random in each update, d are trained, and the last holds
            the push-sum weights.
    """

    def __init__(
        self, num_ranks: int, links: Links, profile: Profile, stragglers: Stragglers, seed: int,
        num_columns: int, objective: Objective | None = None, *, is_biased: bool = False,
    ) -> None:  # fmt: skip
        self.num_ranks, self.links, self._profile = num_ranks, links, profile
        self._stragglers, self._seed, self._step = stragglers, seed, 0
        self._computing = profile.computing * links.computing(num_ranks)
        for rank, factor in stragglers.slow.items():
            self._computing[rank] *= factor
        self._computed = self._computing  # in the last step
        self.now, self.waited = np.zeros(num_ranks), np.zeros(num_ranks)
        self.card_bytes = np.zeros(-(-num_ranks // links.ranks_per_machine))
        self._random, self._columns = np.random.default_rng(seed), num_columns
        self._drawn: list[tuple[np.ndarray, np.ndarray]] = []  # of steps at a rank's own pace
        dimension = 0 if objective is None else objective.dimension
        self.values = np.zeros((num_ranks, 2 * num_columns + dimension + 1))
        self.values[:, :num_columns] = self._random.standard_normal((num_ranks, num_columns))
        self.values[:, -1] = 1.0
        self.training: Training | None = None
        if objective is not None:
            values = self.values[:, 2 * num_columns :]
            self.training = Training(objective, values, seed, is_biased=is_biased)
        self._round = lru_cache(_CACHED_ROUNDS)(self._round_of)
        self._all_reduce_seconds = lru_cache(_CACHED_ROUNDS)(links.all_reduce_seconds)

    def compute_alone(self, rank: int, step: int) -> float:
        """Return the seconds for which a rank computes in a step of its own."""
        if step == len(self._drawn):
            seconds = self._stragglers.draw(self._computing, self._seed, step)
            changes = self._random.standard_normal((self.num_ranks, self._columns))
            self._drawn.append((seconds, changes))
        if self.training is not None:
            self.training.compute_alone(rank, step)
        return float(self._drawn[step][0][rank])

    def update_alone(self, rank: int, step: int) -> float:
        """Change a rank's values as its optimizer does in a step; return the seconds it takes."""
        self.values[rank, self._columns : 2 * self._columns] += self._drawn[step][1][rank]
        if self.training is not None:
            self.training.update(rank)
        return self._profile.stepping

    def count_bytes(self, sender: int, receiver: int, num_bytes: float) -> None:
        """Count a message that a card may have to send."""
        machine = sender // self.links.ranks_per_machine
        if machine != receiver // self.links.ranks_per_machine:
            self.card_bytes[machine] += num_bytes

    def compute(self) -> None:
        """Let each rank compute its gradient."""
        self._computed = self._stragglers.draw(self._computing, self._seed, self._step)
        self.now = self.now + self._computed
        if self.training is not None:
            self.training.compute(self._step)
        self._step += 1

    def update(self) -> None:
        """Let each rank's optimizer step."""
        self.now = self.now + self._profile.stepping
        shape = self.num_ranks, self._columns
        self.values[:, self._columns : 2 * self._columns] += self._random.standard_normal(shape)
        if self.training is not None:
            self.training.update()

    def encode(self) -> None:
        """Let each rank encode a message."""
        self.now = self.now + self._profile.encoding

    def wait(self, until: np.ndarray | float) -> None:
        """Let each rank wait until a time."""
        later = np.maximum(self.now, until)
        self.waited += later - self.now
        self.now = later

    def send(self, topology: Topology, index: int, num_bytes: float, columns: slice) -> Sent:
        """Send the messages of a topology's round; each rank keeps the rest of its mass."""
        edges, seconds, num_crossing = self._round(topology, index, num_bytes)
        ends = np.maximum(self.now[edges.senders], self.now[edges.receivers]) + seconds
        received = self.now.copy()
        np.maximum.at(received, edges.receivers, ends)
        np.maximum.at(received, edges.senders, ends)
        self.card_bytes += num_crossing * num_bytes
        messages = edges.sent(self.values[:, columns])
        self.values[:, columns] *= edges.kept[:, None]
        return received, messages, columns

    def send_to_all(self, num_bytes: float) -> Sent:
        """Send equal shares to all others, by an all-reduce."""
        kept = self.values / self.num_ranks
        messages = self.average(slice(None), self.num_ranks) - kept
        self.values[:] = kept
        return self.all_reduce(num_bytes), messages, slice(None)

    def all_reduce(self, num_bytes: float, begin: float = 0.0, times: float = 1) -> float:
        """Return when all-reduces end that begin once all ranks are ready, and a time has come.

        Their values are those of ``average``; ``num_bytes`` are of all ``times`` together.
        """
        ready = max(float(self.now.max()), begin)
        return ready + times * self.all_reduce_seconds(num_bytes / times, self.num_ranks, times)

    def all_reduce_seconds(self, num_bytes: float, group: int, times: float = 1) -> float:
        """Return the seconds of one of several all-reduces in each group; count their bytes."""
        if group > self.links.ranks_per_machine:  # a ring leaves each machine once
            self.card_bytes += times * 2 * num_bytes * (group - 1) / group
        return self._all_reduce_seconds(num_bytes, self.num_ranks, group)

    def reduce_gradients(self, num_bytes: float, group: int, cost: Cost | None = None) -> None:
        """Average gradients in each group during backward, in buckets of equal size or of a cost.

        With a cost they are encoded during backward, too.
        """
        buckets = max(1, round(num_bytes / BUCKET_BYTES))
        shares, times = (1 / buckets,) * buckets, buckets
        work = (1 - self._profile.forward_share) * self._computed
        if cost is not None:
            self.encode()
            shares, times, work = cost.buckets, cost.collectives, work + self._profile.encoding
        seconds = times * self.all_reduce_seconds(num_bytes / times, group, times)
        spans = list(pairwise(accumulate(shares, initial=0.0)))
        # When the slowest is ready for bucket b is a maximum of functions linear in b, so convex:
        # the longest wait is what follows the first of equal buckets or the last one.
        if len(set(shares)) == 1:
            spans = [spans[0], spans[-1]]
        until = self.now
        for begin, end in spans:
            ready = self.latest(self.now - (1 - end) * work, group)
            until = np.maximum(until, ready + (1 - begin) * seconds)
        self.wait(until)

    def latest(self, times: np.ndarray, group: int) -> np.ndarray:
        """Return the latest of the times in each rank's group, (n,)."""
        found: np.ndarray = times.reshape(-1, group).max(1).repeat(group)
        return found

    def average(self, columns: slice, group: int) -> np.ndarray:
        """Return the means of values over each rank's group, (n, c)."""
        held = self.values[:, columns]
        found: np.ndarray = held.reshape(-1, group, held.shape[1]).mean(1).repeat(group, 0)
        return found

    def measure(self, values: np.ndarray | None = None) -> list[float]:
        """Return the rms distance from the mean, of both kinds of values; the loss, if any."""
        values, end = self.values if values is None else values, 2 * self._columns
        debiased = values[:, :end] / values[:, -1:]
        mean = values[:, :end].mean(0) / values[:, -1].mean()
        squares = ((debiased - mean) ** 2).mean(0).reshape(2, -1)
        found: list[float] = np.sqrt(squares.mean(1)).tolist()
        return found if self.training is None else [*found, self.training.loss(values[:, end:-1])]

    def _round_of(
        self, topology: Topology, index: int, num_bytes: float
    ) -> tuple[Edges, np.ndarray, np.ndarray]:
        edges, per_machine = topology.round_edges(index), self.links.ranks_per_machine
        machines = edges.senders // per_machine
        crossing = machines[machines != edges.receivers // per_machine]
        num_crossing = np.bincount(crossing, minlength=len(self.card_bytes))
        return edges, self.links.seconds(edges, num_bytes, self.num_ranks), num_crossing
