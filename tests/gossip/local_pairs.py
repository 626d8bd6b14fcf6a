"""Ranks of one process that exchange in pairs, one after the other in any order, or as threads.

A message is read when somebody waits for it, the latest moment gloo could read it at: whoever has
changed a tensor under way until then is caught.
"""

import threading
from collections import defaultdict

import torch

from pyparallel.comm import Flags
from pyparallel.gossip.algorithms.pairwise import PairwiseRounds
from pyparallel.gossip.algorithms.partners import Partners


class LocalStore:
    """Counters of one process."""

    def __init__(self):
        self._counters = defaultdict(int)
        self._lock = threading.Lock()

    def add(self, key, amount):
        with self._lock:
            self._counters[key] += amount
            return self._counters[key]


class Channel:
    """Messages of one rank to one other: sends and receives match in order."""

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
            assert arrived, "nobody may wait for what has not been sent"
            while self.num_delivered <= index:
                tensor, content = self.sends[self.num_delivered]
                assert torch.equal(tensor, content), "changed under way"
                self.receives[self.num_delivered].copy_(tensor)
                self.num_delivered += 1


class LocalRound:
    def __init__(self, world, places):
        self._world = world
        self._places = places

    def wait(self):
        for channel, index in self._places:
            channel.deliver(index, self._world.timeout)


class LocalExchange:
    def __init__(self, world, rank):
        self._world = world
        self.rank = rank
        self.bytes_sent = 0

    def start(self, sends, receives, step):
        places = []
        for send in sends:
            channel = self._world.channels[self.rank, send.peer]
            with channel.condition:
                channel.sends.append((send.tensor, send.tensor.clone()))
                channel.condition.notify_all()
                places.append((channel, len(channel.sends) - 1))
            self.bytes_sent += send.tensor.numel() * send.tensor.element_size()
        for receive in receives:
            channel = self._world.channels[receive.peer, self.rank]
            with channel.condition:
                channel.receives.append(receive.tensor)
                channel.condition.notify_all()
                places.append((channel, len(channel.receives) - 1))
        return LocalRound(self._world, places)


class World:
    """All ranks, each with z of several flat buffers, and their rounds."""

    def __init__(self, topology, values, seed=0):
        self.num_ranks = topology.num_ranks
        self.channels = defaultdict(Channel)
        self.timeout = 0  # in turn: what is not there now never comes
        self._barrier = None
        store, partners = LocalStore(), Partners(topology, seed)
        self.buffers = [[buffer.clone() for buffer in value] for value in values]
        self.rounds = [
            PairwiseRounds(
                self.buffers[rank],
                LocalExchange(self, rank),
                Flags(store, rank, 1 + len(partners.askers_of(rank))),
                partners,
                self._meet,
                patience=1e9,
            )
            for rank in range(self.num_ranks)
        ]

    def step(self, rank, update=None):
        """What a step does, with an update of z in its middle: update(z) is added."""
        self.rounds[rank].begin()
        if update is not None:
            for buffer in self.buffers[rank]:
                buffer.add_(update(buffer))
        self.rounds[rank].end()

    def flush(self):
        """All ranks together."""
        self._together(lambda rank: self.rounds[rank].flush())

    def as_merged(self):
        """z of each rank with what travels counted in, in float64."""
        merged = [rounds.as_merged()[0] for rounds in self.rounds]
        return torch.stack([torch.cat(buffers).double() for buffers in merged])

    def load(self, states):
        """All ranks together."""
        self._together(lambda rank: self.rounds[rank].load_state_dict(states[rank]))

    def values(self):
        """z of each rank, in float64."""
        return torch.stack([torch.cat(buffers).double() for buffers in self.buffers])

    def _meet(self):
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
