"""Ranks as threads of one process, with an Exchange that moves tensors through queues."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pyparallel.comm import Transfer


class LocalRound:
    """Messages under way between threads."""

    def __init__(self, mailboxes, rank: int, receives: Sequence[Transfer]) -> None:
        self._mailboxes = mailboxes
        self._rank = rank
        self._receives = receives

    def wait(self) -> None:
        for receive in self._receives:
            mailbox = self._mailboxes[receive.peer, self._rank]
            receive.tensor.copy_(mailbox.get(timeout=30))
        self._receives = ()


class LocalExchange:
    """``comm.NeighborExchange`` without processes: messages arrive in order and are never lost."""

    def __init__(self, mailboxes, rank: int, num_ranks: int) -> None:
        self._mailboxes = mailboxes
        self.rank = rank
        self.num_ranks = num_ranks
        self.bytes_sent = 0

    def start(self, sends, receives, step: int) -> LocalRound:
        for send in sends:
            self._mailboxes[self.rank, send.peer].put(send.tensor.clone())
            self.bytes_sent += send.tensor.numel() * send.tensor.element_size()
        return LocalRound(self._mailboxes, self.rank, receives)


def run_threads(num_ranks: int, function: Callable[[LocalExchange], Any]) -> list[Any]:
    """What function(exchange) returned on each rank; the first error is raised."""
    pairs = [(i, j) for i in range(num_ranks) for j in range(num_ranks)]
    mailboxes = {pair: queue.Queue() for pair in pairs}
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(LocalExchange(mailboxes, rank, num_ranks))
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
