"""NCCL without a GPU: ranks are threads, which enqueue operations; `Streams` runs them.

Each rank has a compute stream, and a stream for each communicator, which runs its operations in
order. A send and its receive complete together, once both are at the front of their streams and the
work before them on their compute streams is done. Tensors are on the meta device. Headers, and
payloads through the host, are exchanged at once, as over gloo. A rank waits for these, for its
peer's first operation, and, where kernels are loaded when they run first, for all operations before
a new kernel: CUDA may load it only once nothing runs.
"""

import threading
from collections import defaultdict, deque
from contextlib import nullcontext
from dataclasses import dataclass

import torch

META = torch.device("meta")
VIA_HOST_TAG = 1


@dataclass(eq=False)
class Operation:
    """A send or a receive; on a compute stream, the wait for one."""

    compute: list  # of its rank: operations to wait for; None is a computation
    after: int  # how many of them come before
    rank: int
    peer: int
    index: int  # its partner's among the others
    others: list

    def wait(self):
        self.compute.append(self)

    def is_completed(self):
        return False


class HostWork:
    """A send or a receive of a header, or of a payload through the host."""

    def __init__(self, group, tensor, is_here, tag):
        self.group, self.tensor, self.is_here, self.tag = group, tensor, is_here, tag

    def wait(self, timeout=None):
        self.group.world.wait(lambda: self.is_here)
        self.group.wait_for_copy(self.tag)


class Streams:
    """What has run of all that ranks have enqueued, as far as it can.

    Args:
        eager: a group is one communicator with one stream: the backend nccl of a group with a
            ``device_id``, and nccl2 of torch 2.15. Otherwise each two ranks of it have one: nccl
            without, and nccl-lazy of torch 2.15.
    """

    def __init__(self, num_ranks, eager):
        self.eager, self.done = eager, set()
        self.positions = [0] * num_ranks  # on the compute streams
        self.queues = defaultdict(deque)

    def add(self, group, operation):
        self.queues[group, operation.rank, self.eager or operation.peer].append(operation)

    def advance(self, computes):
        """Run what can run; return how many operations are left."""
        progress = True
        while progress:
            progress = False
            for rank, compute in enumerate(computes):
                while self.positions[rank] < len(compute):
                    waited_for = compute[self.positions[rank]]
                    if waited_for is not None and waited_for not in self.done:
                        break
                    self.positions[rank] += 1
                    progress = True
            queues = [queue for queue in self.queues.values() if queue]
            ready = {q[0] for q in queues if self.positions[q[0].rank] >= q[0].after}
            for queue in queues:
                first = queue[0]
                if first in ready and {*first.others[first.index : first.index + 1]} & ready:
                    self.done.add(queue.popleft())
                    progress = True
        return sum(map(len, self.queues.values()))

    def is_idle(self, rank, computes):
        """Return whether a rank's GPU has run all that it was given."""
        self.advance(computes)
        mine = (queue for (_, owner, _), queue in self.queues.items() if owner == rank)
        return self.positions[rank] == len(computes[rank]) and not any(mine)


class World:
    """All ranks, and what they have enqueued; ``is_stuck``, if all came to wait for each other.

    Args:
        num_ranks: threads.
        connects: whether the first operation between two ranks of a group waits for the peer's.
        loads: whether a kernel is loaded when it runs first.
    """

    def __init__(self, num_ranks, connects, *, loads=False):
        self.num_ranks, self.connects, self.loads = num_ranks, connects, loads
        self.changed = threading.Condition()
        self.thread = threading.local()
        self.waiting, self.num_ended, self.is_stuck = {}, 0, False
        self.computes = [[] for _ in range(num_ranks)]
        self.loaded = [set() for _ in range(num_ranks)]
        self.simulated = Streams(num_ranks, eager=False), Streams(num_ranks, eager=True)
        self.edges = defaultdict(set)  # by group and rank
        self.sends, self.receives = defaultdict(list), defaultdict(list)  # by group and edge
        self.num_early = 0  # receives that were posted before their sends
        self.headers = defaultdict(lambda: (deque(), deque()))  # sent and posted, by edge and tag

    def compute(self, kernel):
        rank = self.thread.rank
        if self.loads and kernel not in self.loaded[rank]:
            self.loaded[rank].add(kernel)
            self.wait(lambda: self.simulated[1].is_idle(rank, self.computes))
        with self.changed:
            self.computes[rank].append(None)

    def num_left(self):
        """Return how many operations never complete, without and with eager communicators."""
        return [streams.advance(self.computes) for streams in self.simulated]

    def wait(self, is_over):
        """Wait until a condition holds; an error on all ranks once every rank waits."""
        with self.changed:
            rank = self.thread.rank
            self.waiting[rank] = is_over
            self._find_stuck()
            self.changed.wait_for(lambda: self.is_stuck or is_over())
            del self.waiting[rank]
            assert not self.is_stuck, "every rank waits for another one"

    def _find_stuck(self):
        all_wait = self.waiting and len(self.waiting) + self.num_ended == self.num_ranks
        if all_wait and not any(is_over() for is_over in self.waiting.values()):
            self.is_stuck = True
            self.changed.notify_all()

    def run(self, function):
        """Run a function of the rank on a thread each."""
        errors = []

        def target(rank):
            self.thread.rank = rank
            try:
                function(rank)
            except BaseException as error:
                errors.append(error)
            with self.changed:
                self.num_ended += 1
                self._find_stuck()

        threads = [threading.Thread(target=target, args=(r,)) for r in range(self.num_ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors and not self.is_stuck:
            raise errors[0]


class Group:
    """A process group as channels use it, and its run; of the rank's replica, ``replica_size``."""

    def __init__(self, world, index, backend, replica_size=None):
        self.world, self.index, self.group = world, index, self
        self.size = replica_size or world.num_ranks
        replica, self.group_rank = divmod(world.thread.rank, self.size)
        self.first = replica * self.size
        self._post = self._post_header if backend == "gloo" else self._enqueue

    def within(self, members, backend="nccl", *, for_p2p=False):
        """Return another group; this rank's first is the other ranks' first."""
        thread = self.world.thread
        thread.num_groups = getattr(thread, "num_groups", -1) + 1
        return Group(self.world, thread.num_groups, backend, self.size)

    def waiting(self):
        return nullcontext()

    def send(self, tensors, peer, tag):
        edge = self.world.thread.rank, self.first + peer
        return self._post(tensors[0], edge, tag, is_send=True)

    def recv(self, tensors, peer, tag):
        edge = self.first + peer, self.world.thread.rank
        return self._post(tensors[0], edge, tag, is_send=False)

    def exchange(self, peer):
        """Enqueue a send and a receive between two ranks, which complete together."""
        world, rank = self.world, self.world.thread.rank
        compute = world.computes[rank]
        with world.changed:
            own, others = (world.sends[self.index, *e] for e in ((rank, peer), (peer, rank)))
            operation = Operation(compute, len(compute), rank, peer, len(own), others)
            own.append(operation)
            for streams in world.simulated:
                streams.add(self.index, operation)
            world.changed.notify_all()
        return operation

    def wait_for_copy(self, tag):
        """Wait for the compute stream, as a copy between a GPU and the host's memory does."""
        world, rank = self.world, self.world.thread.rank
        if tag == VIA_HOST_TAG:
            streams, count = world.simulated[1], len(world.computes[rank])

            def is_over():
                streams.advance(world.computes)
                return streams.positions[rank] >= count

            world.wait(is_over)

    def _enqueue(self, tensor, edge, tag, is_send):
        world, rank = self.world, self.world.thread.rank
        compute, key = world.computes[rank], (self.index, *edge)
        tables = (world.sends, world.receives) if is_send else (world.receives, world.sends)
        with world.changed:
            own, others = (table[key] for table in tables)
            operation = Operation(compute, len(compute), rank, sum(edge) - rank, len(own), others)
            own.append(operation)
            world.edges[self.index, rank].add((rank, operation.peer))
            for streams in world.simulated:
                streams.add(self.index, operation)
            world.changed.notify_all()
        if world.connects and operation.index == 0:
            world.wait(lambda: others)
        with world.changed:
            world.num_early += not is_send and operation.index >= len(others)
        return operation

    def _post_header(self, tensor, edge, tag, is_send):
        if is_send:
            self.wait_for_copy(tag)
        with self.world.changed:
            sent, posted = self.world.headers[self.index, edge, tag]
            work = HostWork(self, tensor, is_send, tag)
            (sent if is_send else posted).append(tensor.clone() if is_send else work)
            while sent and posted:
                receive = posted.popleft()
                receive.tensor.copy_(sent.popleft())
                receive.is_here = True
            self.world.changed.notify_all()
        return work
