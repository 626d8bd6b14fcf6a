"""Ranks as threads of one process, with the collectives of subnets."""

import threading

import torch


class LocalCollectives:
    """``Collectives`` between threads, as subnets use them; every call is a barrier."""

    def __init__(self, board, barrier, rank, size):
        self._board, self._barrier = board, barrier
        self.rank, self.size = rank, size

    def _gather(self, value):
        self._board[self.rank] = value
        self._barrier.wait(30)
        gathered = list(self._board)
        self._barrier.wait(30)
        return gathered

    def broadcast_(self, tensor, source):
        tensor.copy_(self._gather(tensor.clone())[source])

    def all_reduce_(self, tensor):
        total = torch.zeros_like(tensor)
        for theirs in self._gather(tensor.clone()):  # in rank order: each partial sum is rounded
            total += theirs
        tensor.copy_(total)

    def all_to_all(self, sent, send, receive):
        pieces = [each[self.rank] for each in self._gather(sent.clone().split(list(send)))]
        assert [len(piece) for piece in pieces] == list(receive)
        return torch.cat(pieces)


def run_local_ranks(size, function):
    """Return function(collectives) of each rank; the first error is raised."""
    board, barrier = [None] * size, threading.Barrier(size)
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = function(LocalCollectives(board, barrier, rank, size))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
