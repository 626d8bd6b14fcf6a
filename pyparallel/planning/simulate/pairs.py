"""AD-PSGD, whose ranks exchange at their own pace: steps and messages one after the other."""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ...gossip import ADPSGD
from ...gossip.algorithms.partners import Partners
from .clock import Clock
from .links import Links


@dataclass(eq=False)
class Message:
    """A message that shares the uplinks of the groups that it leaves or enters."""

    cards: list[tuple[int, int, str]]  # uplink, group and direction
    rate: float  # bytes/s that no other message shares
    latency: float
    left: float  # bytes, at ``since``
    since: float
    share: float = 0.0  # bytes/s
    ends: float = np.inf  # when it will have been sent, then when it arrives
    is_sent: bool = False
    is_delivered: bool = False
    waiting: list[int] = field(default_factory=list)  # ranks

    def set_share(self, now: float, share: float) -> bool:
        """Go on at another share; return whether it is another."""
        if share == self.share:
            return False
        self.left -= (now - self.since) * self.share
        self.share, self.since = share, now
        self.ends = now + max(0.0, self.left) / share
        return True

    def end(self) -> None:
        """Arrive, a latency after it has been sent."""
        self.is_sent, self.is_delivered = True, self.is_sent
        self.ends += 0.0 if self.is_delivered else self.latency


class Network:
    """All messages on their way, each at its share of the slowest uplink from moment to moment."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._crossing: dict[tuple[int, int, str], dict[Message, None]] = defaultdict(dict)
        self._free = [min((uplink.rate for uplink in links.uplinks[:end]), default=np.inf)
                      for end in range(len(links.uplinks))]  # fmt: skip

    def begin(self, now: float, sender: int, receiver: int, num_bytes: float) -> list[Message]:
        """Send a message; return it, and those that it slows."""
        cards, latency = [], 0.0
        for level, uplink in enumerate(self._links.uplinks):
            leaves, enters = sender // uplink.ranks, receiver // uplink.ranks
            if leaves != enters:
                cards += [(level, leaves, "out"), (level, enters, "in")]
                latency = uplink.latency
        rate, slow = self._links.slow_edges.get((sender, receiver), (np.inf, 0.0))
        message = Message(cards, rate, max(latency, slow), num_bytes, now)
        return [message, *self._share(now, message, begins=True)]

    def end(self, now: float, message: Message) -> list[Message]:
        """Return the messages that are faster once this one has been sent."""
        return self._share(now, message, begins=False)

    def _share(self, now: float, message: Message, *, begins: bool) -> list[Message]:
        affected: dict[Message, None] = {}
        for card in message.cards:
            crossing = self._crossing[card]
            least = self._links.uplinks[card[0]].rate / (len(crossing) + begins)
            if least < self._free[card[0]]:  # others cannot be slower for this one
                affected.update(crossing)
            if begins:
                crossing[message] = None
            else:
                del crossing[message]
        affected.pop(message, None)
        if begins:
            message.set_share(now, self._rate(message))
        return [each for each in affected if each.set_share(now, self._rate(each))]

    def _rate(self, message: Message) -> float:
        rate, cards = message.rate, message.cards
        for leaving, entering in zip(cards[::2], cards[1::2], strict=True):
            shared = max(len(self._crossing[leaving]), len(self._crossing[entering]))
            rate = min(rate, self._links.uplinks[leaving[0]].rate / shared)
        return rate


class Rank:
    """A rank: what it has sent, accepted and been asked for.

    Args:
        values: its row of the clock's.
    """

    def __init__(self, values: np.ndarray, neighbors: tuple[int, ...]) -> None:
        self.values, self.is_active = values, bool(neighbors)
        self.num_requests = 0
        self.sent = values  # the own request
        self.in_flight = self.is_replied = self.must_accept = False
        self.reply: tuple[float, Message, np.ndarray] | None = None  # when announced, difference
        self.accepted: tuple[Rank, int, Message] | None = None
        self.replies: deque[Message] = deque(maxlen=2)
        self.flags: list[tuple[float, int]] = []  # when raised, by whom
        self.pending: deque[int] = deque()

    def request(self) -> int:
        """Send the values; return the request's number."""
        self.sent, self.in_flight, self.must_accept = self.values.copy(), True, True
        self.num_requests += 1
        return self.num_requests - 1

    def accept(self, peer: "Rank", number: int, message: Message) -> None:
        """Receive the request of a peer."""
        self.accepted, self.must_accept = (peer, number, message), False

    def take_request(self) -> tuple["Rank", int, np.ndarray]:
        """Average with the accepted request; return its rank, and the difference to reply."""
        assert self.accepted is not None
        peer, number, _ = self.accepted
        difference = peer.sent - self.values
        self.values += difference / 2
        self.accepted = None
        return peer, number, difference

    def answer(self, now: float, message: Message, difference: np.ndarray) -> None:
        """Announce the reply to the own request."""
        self.reply = now, message, difference

    def take_reply(self) -> None:
        """Average with the reply to the own request."""
        self.values[:] = self.merged()
        self.reply, self.in_flight, self.is_replied = None, False, False

    def merged(self) -> np.ndarray:
        """Return the values with a reply in flight."""
        return self.values - self.reply[2] / 2 if self.reply is not None else self.values

    def look(self, now: float) -> None:
        """Find the flags raised before now."""
        self.is_replied = self.reply is not None and self.reply[0] < now
        if self.flags:
            self.pending.extend(sorted(peer for time, peer in self.flags if time < now))
            self.flags = [flag for flag in self.flags if flag[0] >= now]


class Pairs:
    """A run of AD-PSGD on all ranks, in the order of ``PairwiseAverager``.

    A flag is seen by looks that come after it. A rank takes steps until all together have taken
    ``num_steps`` for each, so slow ranks take fewer.
    """

    def __init__(self, clock: Clock, algorithm: ADPSGD, num_bytes: float) -> None:
        self.clock, self._num_bytes = clock, num_bytes
        self._partners = Partners(algorithm.bound_topology, algorithm.seed)
        self._network = Network(clock.links)
        ranks = range(clock.num_ranks)
        neighbors = map(self._partners.passive_neighbors, ranks)
        self._ranks = [*map(Rank, clock.values, neighbors)]
        self._ends: list[list[float]] = [[0.0] for _ in ranks]  # of steps
        self._queue: list[tuple[float, int, int | Message]] = []
        self._order = itertools.count()
        self._now = 0.0

    def run(self, num_steps: int) -> Iterator[int]:
        """Run, and yield how many steps the mean rank has taken, whenever it is one more."""
        n = self.clock.num_ranks
        programs = [self._steps(rank) for rank in range(n)]
        waits: dict[int, float] = {}  # since when
        taken = 0
        for rank in range(n):
            self._push(0.0, rank)
        while taken < n * num_steps:
            self._now, _, what = heapq.heappop(self._queue)
            for rank in [what] if isinstance(what, int) else self._progress(what):
                if taken == n * num_steps:
                    break
                self.clock.waited[rank] += self._now - waits.pop(rank, self._now)
                for awaited in programs[rank]:
                    if awaited is None:
                        self._ends[rank].append(self._now)
                        taken += 1
                        if taken % n == 0:
                            yield taken // n
                        if taken == n * num_steps:
                            break
                    elif isinstance(awaited, float):
                        self._push(self._now + awaited, rank)
                        break
                    elif not awaited.is_delivered:
                        awaited.waiting.append(rank)
                        waits[rank] = self._now
                        break
        for rank, since in waits.items():
            self.clock.waited[rank] += self._now - since
        self.clock.now[:] = self._now

    def times(self, ranks: np.ndarray) -> np.ndarray:
        """Return when each step of these ranks has ended, NaN where they have not taken it."""
        ends = [self._ends[rank] for rank in ranks.tolist()]
        return np.array(list(itertools.zip_longest(*ends, fillvalue=np.nan)))

    def merged(self) -> np.ndarray:
        """Return the values with the replies in flight."""
        return np.stack([rank.merged() for rank in self._ranks])

    def _steps(self, rank: int) -> Iterator[float | Message | None]:
        """Yield what the rank waits for: seconds, a message; or None after a step."""
        clock, own = self.clock, self._ranks[rank]
        for step in itertools.count():
            yield clock.compute_alone(rank, step)
            if own.is_replied:
                assert own.reply is not None
                yield own.reply[1]
                own.take_reply()
            if own.accepted is not None:
                yield own.accepted[2]
                peer, number, difference = own.take_request()
                own.replies.append(self._send(rank, number))
                peer.answer(self._now, own.replies[-1], difference)
            yield clock.update_alone(rank, step)
            own.look(self._now)
            if not own.in_flight and own.pending and (own.must_accept or not own.is_active):
                if len(own.replies) == 2:
                    yield own.replies[0]  # sent from the memory that receives next
                number = own.pending.popleft()
                own.accept(self._ranks[number], number, self._send(number, rank))
            elif not own.in_flight and own.is_active:
                peer = self._ranks[self._partners.choose(rank, own.request())]
                peer.flags.append((self._now, rank))
            yield None

    def _send(self, sender: int, receiver: int) -> Message:
        self.clock.count_bytes(sender, receiver, self._num_bytes)
        began = self._network.begin(self._now, sender, receiver, self._num_bytes)
        self._schedule(began)
        return began[0]

    def _progress(self, message: Message) -> list[int]:
        """Let a message have been sent, or arrive; return the ranks that go on."""
        if self._now != message.ends or message.is_delivered:  # its share has changed since
            return []
        message.end()
        if message.is_delivered:
            return message.waiting
        self._schedule([message, *self._network.end(self._now, message)])
        return []

    def _schedule(self, messages: list[Message]) -> None:
        for message in messages:
            self._push(message.ends, message)

    def _push(self, time: float, what: int | Message) -> None:
        heapq.heappush(self._queue, (time, next(self._order), what))
