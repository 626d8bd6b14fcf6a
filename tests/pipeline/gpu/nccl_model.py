"""NCCL without a GPU: ranks are threads, which record what they enqueue; `run_streams` runs it.

Each rank has a compute stream, and a stream for each communicator, which runs its operations in
order. A send and its receive complete together, once both are at the front of their streams and the
work before them on their compute streams is done. Tensors are on the meta device. Headers are
exchanged at once, as over gloo; a rank waits for nothing else but for its peer's first operation.
"""

import threading
from collections import defaultdict, deque
from dataclasses import dataclass

import torch

META = torch.device("meta")
TIME_LIMIT = 20.0  # of a rank that waits for another


@dataclass(eq=False)
class Operation:
    """A send or a receive; on a compute stream, the wait for one."""

    compute: list  # of its rank: operations to wait for; None is a computation
    after: int  # how many of them come before
    rank: int
    peer: int
    is_done: bool = False

    def wait(self):
        self.compute.append(self)

    def is_completed(self):
        return False


class HeaderWork:
    """A send or a receive of a header."""

    def __init__(self, world, tensor, is_here):
        self.world, self.tensor, self.is_here = world, tensor, is_here

    def wait(self, timeout=None):
        with self.world.changed:
            assert self.world.changed.wait_for(lambda: self.is_here, TIME_LIMIT), "no header"


class World:
    """All ranks, and what they have enqueued.

    Args:
        num_ranks: threads.
        connects: whether the first operation between two ranks of a group waits for the peer's.
    """

    def __init__(self, num_ranks, connects):
        self.num_ranks, self.connects = num_ranks, connects
        self.changed = threading.Condition()
        self.thread = threading.local()
        self.computes = [[] for _ in range(num_ranks)]
        self.streams = defaultdict(list)  # by group and rank
        self.sends, self.receives = defaultdict(list), defaultdict(list)  # by group and edge
        self.num_early = 0  # receives that were posted before their sends
        self.headers = defaultdict(lambda: (deque(), deque()))  # sent and posted, by group and edge

    def compute(self):
        self.computes[self.thread.rank].append(None)

    def run(self, function):
        """Run a function of the rank on a thread each."""
        errors = []

        def target(rank):
            self.thread.rank = rank
            try:
                function(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=target, args=(r,)) for r in range(self.num_ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]


class Group:
    """A process group as channels use it, and its run."""

    def __init__(self, world, index, backend):
        self.world, self.index, self.group = world, index, self
        self.size, self.group_rank = world.num_ranks, world.thread.rank
        self._post = self._post_header if backend == "gloo" else self._enqueue

    def within(self, members, backend="nccl", *, for_p2p=False):
        """Return another group; this rank's first is the other ranks' first."""
        thread = self.world.thread
        thread.num_groups = getattr(thread, "num_groups", -1) + 1
        return Group(self.world, thread.num_groups, backend)

    def send(self, tensors, peer, tag):
        return self._post(tensors[0], (self.world.thread.rank, peer), is_send=True)

    def recv(self, tensors, peer, tag):
        return self._post(tensors[0], (peer, self.world.thread.rank), is_send=False)

    def _enqueue(self, tensor, edge, is_send):
        world, rank = self.world, self.world.thread.rank
        compute, key = world.computes[rank], (self.index, *edge)
        operation = Operation(compute, len(compute), rank, sum(edge) - rank)
        tables = (world.sends, world.receives) if is_send else (world.receives, world.sends)
        with world.changed:
            own, others = (table[key] for table in tables)
            own.append(operation)
            world.streams[self.index, rank].append(operation)
            if world.connects and len(own) == 1:
                world.changed.notify_all()
                assert world.changed.wait_for(lambda: others, TIME_LIMIT), "the peer is elsewhere"
            world.num_early += not is_send and len(own) > len(others)
        return operation

    def _post_header(self, tensor, edge, is_send):
        with self.world.changed:
            sent, posted = self.world.headers[(self.index, *edge)]
            work = HeaderWork(self.world, tensor, is_send)
            (sent if is_send else posted).append(tensor.clone() if is_send else work)
            while sent and posted:
                receive = posted.popleft()
                receive.tensor.copy_(sent.popleft())
                receive.is_here = True
            self.world.changed.notify_all()
        return work


def run_streams(world, eager):
    """Run what was enqueued; return how many operations never complete.

    Args:
        world: after all ranks have enqueued all.
        eager: a group is one communicator. Otherwise each two ranks of it have one.
    """
    streams = defaultdict(deque)
    for key, operations in world.streams.items():
        for each in operations:
            each.is_done = False
            streams[key if eager else (*key, each.peer)].append(each)
    partners = {}
    for key, sends in world.sends.items():
        for send, receive in zip(sends, world.receives[key], strict=True):
            partners[send], partners[receive] = receive, send
    positions = [0] * world.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, compute in enumerate(world.computes):
            while positions[rank] < len(compute):
                waited_for = compute[positions[rank]]
                if waited_for is not None and not waited_for.is_done:
                    break
                positions[rank] += 1
                progress = True
        ready = {
            stream[0]
            for stream in streams.values()
            if stream and positions[stream[0].rank] >= stream[0].after
        }
        for stream in streams.values():
            if stream and stream[0] in ready and partners[stream[0]] in ready:
                stream.popleft().is_done = True
                progress = True
    return sum(map(len, streams.values()))
