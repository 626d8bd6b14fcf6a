"""The time at which each rank is, and the values that it holds, while an algorithm runs."""

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from ...gossip.topology import Edges, Topology
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
    """All n ranks that average with each other, in one step after the other.

    A rank waits for the maximum over the messages of a round, so a round is a few operations on
    arrays of all ranks, and no events are needed.

    Args:
        ranks: of the run; with pipelines those of a stage, from the first in steps of the number
            of stages, whose messages of the same round share uplinks.
        draw: the seconds for which each rank of the run computes in a step.
        num_columns: c, of each kind of values.
        bucket_bytes: of gradients, which are averaged while others are computed; inf: after them.
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
        self, ranks: range, links: Links, profile: Profile, draw: Callable[[int], np.ndarray],
        seed: int, num_columns: int, bucket_bytes: float = BUCKET_BYTES,
        objective: Objective | None = None, *, is_biased: bool = False,
    ) -> None:  # fmt: skip
        num_ranks = len(ranks)
        self.ranks, self.num_ranks, self.links = ranks, num_ranks, links
        self._profile, self._draw, self._bucket_bytes = profile, draw, bucket_bytes
        self.now, self.waited = np.zeros(num_ranks), np.zeros(num_ranks)
        self._computed = np.zeros(num_ranks)  # at last, before an update a backward
        self.card_bytes = np.zeros(-(-ranks.stop // links.ranks_per_machine))
        self._machines = np.unique(np.array(ranks) // links.ranks_per_machine)
        self._random, self._columns = np.random.default_rng([seed, ranks.start]), num_columns
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
        self._to_stage = lru_cache(_CACHED_ROUNDS)(self._to_stage_of)
        self._all_reduce_seconds = lru_cache(_CACHED_ROUNDS)(links.all_reduce_seconds)

    def compute_alone(self, rank: int, step: int) -> float:
        """Return the seconds for which a rank computes in a step of its own."""
        if step == len(self._drawn):
            seconds = self._draw(step)
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

    def compute(self, step: int, share: float) -> None:
        """Let each rank compute a share of what it computes in a step."""
        self._computed = share * self._draw(step)[self.ranks.start :: self.ranks.step]
        self.now = self.now + self._computed

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

    def send_to_stage(self, stage: int, num_bytes: float) -> np.ndarray:
        """Send to a stage of the same pipeline; return when that receives it, (n,)."""
        seconds, num_crossing = self._to_stage(stage, num_bytes)
        self.card_bytes += num_crossing * num_bytes
        received: np.ndarray = self.now + seconds
        return received

    def all_reduce(self, num_bytes: float, begin: float = 0.0, times: float = 1) -> float:
        """Return when all-reduces end that begin once all ranks are ready, and a time has come.

        Their values are those of ``average``; ``num_bytes`` are of all ``times`` together.
        """
        ready = max(float(self.now.max()), begin)
        return ready + times * self.all_reduce_seconds(num_bytes / times, self.num_ranks, times)

    def all_reduce_seconds(self, num_bytes: float, group: int, times: float = 1) -> float:
        """Return the seconds of one of several all-reduces in each group; count their bytes."""
        stages = self.ranks.step
        if group * stages > self.links.ranks_per_machine:  # a ring leaves each machine once
            self.card_bytes[self._machines] += times * 2 * num_bytes * (group - 1) / group
        return self._all_reduce_seconds(num_bytes, self.ranks.stop, group, stages)

    def reduce_gradients(self, num_bytes: float, group: int, cost: Cost | None = None) -> None:
        """Average gradients in each group during backward, in buckets of equal size or of a cost.

        With a cost they are encoded during backward, too.
        """
        buckets = max(1, round(num_bytes / self._bucket_bytes))
        shares, times = (1 / buckets,) * buckets, buckets
        work = self._computed
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
        edges, stages = topology.round_edges(index), np.arange(self.ranks.step)
        both = edges.senders, edges.receivers
        senders, receivers = (each[:, None] * len(stages) + stages for each in both)
        seconds, crossing = self._costs_of(senders, receivers, num_bytes)
        return edges, seconds[:, self.ranks.start], crossing

    def _to_stage_of(self, stage: int, num_bytes: float) -> tuple[np.ndarray, np.ndarray]:
        own = np.array(self.ranks)[:, None]
        seconds, crossing = self._costs_of(own, own + stage - self.ranks.start, num_bytes)
        return seconds[:, 0], crossing

    def _costs_of(
        self, senders: np.ndarray, receivers: np.ndarray, num_bytes: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of messages of (m, s) ranks, and how many of its own a card sends."""
        stage, num_stages = self.ranks.start, self.ranks.step
        shares = np.zeros(senders.size)
        edges = Edges.of(senders.ravel(), receivers.ravel(), shares, self.ranks.stop)
        machines = edges.senders // self.links.ranks_per_machine
        crosses = machines != edges.receivers // self.links.ranks_per_machine
        crosses &= edges.senders % num_stages == stage
        num_crossing = np.bincount(machines[crosses], minlength=len(self.card_bytes))
        seconds = self.links.seconds(edges, num_bytes, self.ranks.stop)
        return seconds.reshape(senders.shape), num_crossing
