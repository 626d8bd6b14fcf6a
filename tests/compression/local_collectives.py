"""Ranks as threads of one process, for averages of many steps: a tenth of the time of gloo's."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from pyparallel.compression import Collectives, CommStats


class LocalCollectives(Collectives):
    """One of the threads that share a table, on which each lays what it sends."""

    def __init__(self, rank, table, barrier):
        self.rank, self.size, self.group, self.stats = rank, len(table), None, CommStats()
        self._table, self._barrier = table, barrier

    def all_to_all(self, tensor, sizes_out, sizes_in):
        parts = self._everybody(tensor.split(list(sizes_out)))
        received = torch.cat([of_sender[self.rank] for of_sender in parts])
        assert received.numel() == sum(sizes_in)
        return received

    def all_gather(self, tensor):
        return torch.stack(self._everybody(tensor))

    def _everybody(self, mine):
        self._table[self.rank] = mine
        self._barrier.wait()
        all_of_them = list(self._table)
        self._barrier.wait()  # before anybody lays the next
        return all_of_them


def run_locally(num_ranks, function):
    """What ``function(ranks)`` returns on each rank."""
    table, barrier = [None] * num_ranks, Barrier(num_ranks, timeout=60)
    collectives = [LocalCollectives(rank, table, barrier) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(function, collectives))
