"""Ranks in one process that exchange in pairs, one after the other in any order, or as threads.

A message is read when a rank waits for it, the latest time at which gloo could read it: a tensor
changed while in flight is detected.
"""

import threading
from collections import defaultdict

import torch

from pyparallel.gossip.algorithms.pairwise import PairwiseAverager
from pyparallel.gossip.algorithms.partners import Partners
from pyparallel.gossip.messages import Flags, NeighborExchange
from tests.local_transport import LocalRun


class LocalStore:
    """Counters in one process."""

    def __init__(self):
        self._counters = defaultdict(int)
        self._lock = threading.Lock()

    def add(self, key, amount):
        with self._lock:
            self._counters[key] += amount
            return self._counters[key]


class Channel:
    """Messages from one rank to another: sends and receives match in order."""

    def __init__(self):
        self.condition = threading.Condition()
        self.sends = []
        self.receives = []
        self.num_delivered = 0

    def deliver(self, index, timeout):
        with self.condition:
            arrived = self.condition.wait_for(
                lambda: min(len(self.sends), len(self.receives)) > index, timeout
            )
            assert arrived, "a rank must not wait for a message that has not been sent"
            while self.num_delivered <= index:
                tensor, content = self.sends[self.num_delivered]
                assert torch.equal(tensor, content), "changed while in flight"
                self.receives[self.num_delivered].copy_(tensor)
                self.num_delivered += 1


class LocalPendingExchange:
    def __init__(self, world, messages):
        self._world = world
        self._messages = messages

    def keep(self):
        """Nothing is received later."""

    def wait(self, kind=None):
        for channel, index in self._messages:
            channel.deliver(index, self._world.timeout)


class LocalExchange(NeighborExchange):
    def __init__(self, world, rank):
        super().__init__(LocalRun(rank, world.num_ranks))
        self._world = world

    def start(self, sends, receives):
        messages = []
        for send in sends:
            channel = self._world.channels[self.rank, send.peer]
            with channel.condition:
                channel.sends.append((send.tensor, send.tensor.clone()))
                channel.condition.notify_all()
                messages.append((channel, len(channel.sends) - 1))
            self.run.stats.count_bytes(send.tensor.numel() * send.tensor.element_size())
        for receive in receives:
            channel = self._world.channels[receive.peer, self.rank]
            with channel.condition:
                channel.receives.append(receive.tensor)
                channel.condition.notify_all()
                messages.append((channel, len(channel.receives) - 1))
        return LocalPendingExchange(self._world, messages)


class World:
    """All ranks, each with z of several flat buffers, and their averagers."""

    def __init__(self, topology, values, seed=0):
        self.num_ranks = topology.num_ranks
        self.channels = defaultdict(Channel)
        self.timeout = 0  # ranks step in turn: what is not there now will never be sent
        self._barrier = None
        store, partners = LocalStore(), Partners(topology, seed)
        self.buffers = [[buffer.clone() for buffer in value] for value in values]
        self.averagers = [
            PairwiseAverager(
                self.buffers[rank],
                LocalExchange(self, rank),
                Flags(store, rank, 1 + len(partners.active_neighbors(rank))),
                partners,
                self._wait_for_all,
                timeout=1e9,
            )
            for rank in range(self.num_ranks)
        ]

    def step(self, rank, update=None):
        """Take a step on one rank, with update(z) added to z in between."""
        self.averagers[rank].before_step()
        if update is not None:
            for buffer in self.buffers[rank]:
                buffer.add_(update(buffer))
        self.averagers[rank].after_step()

    def flush(self):
        """Flush all ranks together."""
        self._together(lambda rank: self.averagers[rank].flush())

    def as_merged(self):
        """Return z of each rank with messages in flight merged, in float64."""
        merged = [averager.as_merged()[0] for averager in self.averagers]
        return torch.stack([torch.cat(buffers).double() for buffers in merged])

    def load(self, states):
        """Load the states on all ranks together."""
        self._together(lambda rank: self.averagers[rank].load_state_dict(states[rank]))

    def values(self):
        """Return z of each rank, in float64."""
        return torch.stack([torch.cat(buffers).double() for buffers in self.buffers])

    def _wait_for_all(self):
        if self._barrier is not None:
            self._barrier.wait(30)

    def _together(self, action):
        errors = []

        def run(rank):
            try:
                action(rank)
            except BaseException as error:
                errors.append(error)

        self.timeout, self._barrier = 30, threading.Barrier(self.num_ranks)
        threads = [threading.Thread(target=run, args=(r,)) for r in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.timeout, self._barrier = 0, None
        if errors:
            raise errors[0]
