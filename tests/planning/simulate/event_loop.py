"""A plain event loop: one program for each rank, one message after the other.

It shares nothing with the simulator but the links' seconds for one message and one all-reduce.
"""

import heapq
import itertools
from collections import defaultdict


class EventLoop:
    """Runs the programs of ranks, generators that yield what they do:

    * ``("compute", seconds)``
    * ``("post", key, to, from_)``: sends to ranks and receives from others, and goes on
    * ``("wait", key)``: until all its messages of the key are complete
    * ``("join", key, ranks, seconds, channel)``: takes part in a collective, and goes on; it begins
      when all ranks take part and the one before on its channel has ended
    * ``("meet", key)``: waits for that collective
    * ``("send", key, seconds)``: sends a message, and goes on; ``meet`` waits for it, too
    * ``("end",)``: of a step
    """

    def __init__(self, link_seconds):
        self.link_seconds = link_seconds  # of (round key, sender, receiver)
        self.posted, self.due = {}, defaultdict(dict)  # (key, a, b) -> time; (key, rank) -> ends
        self.joined, self.ends, self.free = defaultdict(set), {}, defaultdict(float)
        self.waiting, self.queue, self.order = {}, [], itertools.count()
        self.ended = defaultdict(list)

    def run(self, programs):
        for rank in range(len(programs)):
            self._resume(rank, 0.0)
        while self.queue:
            now, _, rank = heapq.heappop(self.queue)
            self._go_on(rank, now, programs[rank])
        assert not self.waiting
        return [self.ended[rank] for rank in range(len(programs))]

    def _go_on(self, rank, now, program):
        for what, *rest in program:
            if what == "compute":
                return self._resume(rank, now + rest[0])
            if what == "end":
                self.ended[rank].append(now)
            elif what == "post":
                self._post(rank, now, *rest)
            elif what == "join":
                self._join(rank, now, *rest)
            elif what == "send":
                self.ends[rest[0]] = now + rest[1]
                for each in list(self.waiting):
                    self._try(each)
            else:
                self.waiting[rank] = now, what, rest[0]
                return self._try(rank)
        return None

    def _post(self, rank, now, key, to, from_):
        for a, b in [*((rank, peer) for peer in to), *((peer, rank) for peer in from_)]:
            if (key, a, b) in self.posted:
                end = max(now, self.posted[key, a, b]) + self.link_seconds(key, a, b)
                self.due[key, a][a, b] = self.due[key, b][a, b] = end
                for each in (a, b):
                    self._try(each)
            else:
                self.posted[key, a, b] = now
                self.due[key, rank][a, b] = None
                self.due[key, b if rank == a else a].setdefault((a, b))

    def _join(self, rank, now, key, ranks, seconds, channel):
        self.joined[key].add(rank)
        if len(self.joined[key]) == len(ranks):
            self.ends[key] = self.free[channel] = max(now, self.free[channel]) + seconds
            for each in ranks:
                self._try(each)

    def _try(self, rank):
        if rank not in self.waiting:
            return
        now, what, key = self.waiting[rank]
        ends = [self.ends.get(key)] if what == "meet" else self.due[key, rank].values()
        if None not in ends:
            del self.waiting[rank]
            self._resume(rank, max([now, *ends]))

    def _resume(self, rank, now):
        heapq.heappush(self.queue, (now, next(self.order), rank))
