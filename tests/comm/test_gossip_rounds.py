"""Exchanges deliver what was sent, in any order of rounds and peers."""

import pytest
import torch

from pyparallel.comm import NeighborExchange, Transfer
from tests.workers import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def all_to_all(rank, dtype):
    exchange = NeighborExchange()
    others = [peer for peer in range(exchange.num_ranks) if peer != rank]
    arrived = {}
    for step in range(5):
        sends = [
            Transfer(peer, torch.tensor([rank, peer, step, part], dtype=dtype))
            for peer in others
            for part in range(2)
        ]
        receives = [Transfer(p, torch.zeros(4, dtype=dtype)) for p in others for _ in range(2)]
        exchange.start(sends, receives, step).wait()
        for index, receive in enumerate(receives):
            arrived[receive.peer, step, index % 2] = receive.tensor.tolist()
    return arrived, exchange.bytes_sent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_messages_arrive_in_order(num_ranks, dtype):
    for rank, (arrived, bytes_sent) in enumerate(run_ranks(num_ranks, all_to_all, dtype)):
        assert len(arrived) == (num_ranks - 1) * 5 * 2
        for (peer, step, part), values in arrived.items():
            assert values == [peer, rank, step, part]
        assert bytes_sent == (num_ranks - 1) * 5 * 2 * 4 * dtype.itemsize


def nothing(rank):
    exchange = NeighborExchange()
    exchange.start([], [], step=0).wait()
    return exchange.bytes_sent


def test_an_empty_round_returns_at_once():
    assert run_ranks(2, nothing) == [0, 0]
