"""Ranks as threads of one process, with an exchange that moves tensors through queues."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pyparallel.comm import Run, StepCounts
from pyparallel.comm.p2p import Transfer
from pyparallel.gossip.messages import NeighborExchange


class LocalRun(Run):
    """The run of a rank that is a thread, or alone in its process."""

    def __init__(
        self, rank: int, num_ranks: int, counts: StepCounts | None = None, group: Any = None
    ) -> None:
        super().__init__(counts=counts or StepCounts())
        self._group = group
        self.rank, self.group_rank, self.size = rank, rank, num_ranks

    def global_rank(self, rank: int) -> int:
        return rank


class LocalPendingExchange:
    """Messages in flight between threads."""

    def __init__(self, queues, rank: int, receives: Sequence[Transfer]) -> None:
        self._queues = queues
        self._rank = rank
        self._receives = receives

    def keep(self) -> None:
        """Nothing is received later."""

    def wait(self, kind: int | None = None) -> None:
        for receive in self._receives:
            messages = self._queues[receive.peer, self._rank]
            receive.tensor.copy_(messages.get(timeout=30))
        self._receives = ()


class LocalCollectives:
    """The all-reduce of threads."""

    def __init__(self, queues, rank: int, num_ranks: int) -> None:
        self._queues, self._rank, self._num_ranks = queues, rank, num_ranks

    def start_all_reduce_(self, tensor):
        for peer in range(self._num_ranks):
            self._queues[self._rank, peer].put(tensor.clone())
        return tensor

    def finish_all_reduce(self, tensor) -> None:
        parts = [self._queues[peer, self._rank].get(timeout=30) for peer in range(self._num_ranks)]
        torch.sum(torch.stack(parts), 0, out=tensor)


class LocalExchange(NeighborExchange):
    """An exchange without processes: messages arrive in order and are never lost."""

    def __init__(self, queues, rank: int, num_ranks: int) -> None:
        super().__init__(LocalRun(rank, num_ranks))
        self._queues = queues
        self.collectives = LocalCollectives(queues, rank, num_ranks)

    def start(self, sends, receives) -> LocalPendingExchange:
        for send in sends:
            self._queues[self.rank, send.peer].put(send.tensor.clone())
            self.run.stats.count_bytes(send.tensor.numel() * send.tensor.element_size())
        return LocalPendingExchange(self._queues, self.rank, receives)


def run_threads(num_ranks: int, function: Callable[[LocalExchange], Any]) -> list[Any]:
    """Return function(exchange) of each rank, in threads; raise the first error."""
    pairs = [(i, j) for i in range(num_ranks) for j in range(num_ranks)]
    queues = {pair: queue.Queue() for pair in pairs}
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(LocalExchange(queues, rank, num_ranks))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
