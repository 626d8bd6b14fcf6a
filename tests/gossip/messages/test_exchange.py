"""Exchanges deliver what was sent, in any order of rounds and peers."""

import socket
from unittest import mock

import torch

from pyparallel.comm import Run
from pyparallel.comm.p2p import Transfer
from pyparallel.gossip.messages import NeighborExchange, SymmetricMemoryExchange
from tests.gossip.loops import error_of
from tests.local_transport import LocalRun
from tests.workers import on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def send_dtype_to_all(rank, dtype):
    exchange = NeighborExchange(Run())
    others = [peer for peer in range(exchange.num_ranks) if peer != rank]
    arrived = {}
    for step in range(5):
        sends = [
            Transfer(peer, torch.tensor([rank, peer, step, part], dtype=dtype))
            for peer in others
            for part in range(2)
        ]
        receives = [Transfer(p, torch.zeros(4, dtype=dtype)) for p in others for _ in range(2)]
        exchange.start(sends, receives).wait()
        for index, receive in enumerate(receives):
            arrived[receive.peer, step, index % 2] = receive.tensor.tolist()
    return arrived, exchange.run.stats.wire_bytes


def test_messages_arrive_in_order(ranks):
    results = ranks.run_each(4, send_dtype_to_all, [(dtype,) for dtype in DTYPES])
    for dtype, found in zip(DTYPES, results, strict=True):
        for rank, (arrived, bytes_sent) in enumerate(found):
            assert len(arrived) == 3 * 5 * 2, dtype
            for (peer, step, part), values in arrived.items():
                assert values == [peer, rank, step, part], dtype
            assert bytes_sent == 3 * 5 * 2 * 4 * dtype.itemsize


def test_peers_must_be_other_ranks():
    exchange = NeighborExchange(LocalRun(1, 3))
    for to, from_ in ([1], []), ([], [3]), ([0, -1], []):
        error = error_of(exchange.swap, [torch.ones(2)], to, from_)
        wanted = f"to and from_ on rank 1 must be other ranks, below 3, got {(to + from_)[-1]}"
        assert error == f"ValueError: {wanted}"


@on_ranks(2)
def test_an_empty_round_returns_at_once(rank):
    exchange = NeighborExchange(Run())
    exchange.start([], []).wait()
    assert exchange.run.stats.wire_bytes == 0


def fail_to_share_memory(rank):
    reserve = SymmetricMemoryExchange(NeighborExchange(Run())).reserve
    on_cpu = error_of(reserve, [[64]], torch.device("cpu"))
    with mock.patch.object(socket, "gethostname", return_value=f"node-{rank}"):
        return on_cpu, error_of(reserve, [[64]], torch.device("cuda", 0))


def test_memory_that_cannot_be_shared_is_one_sentence_on_all_ranks(ranks):
    sentences = (
        "DisagreementError: ranks 0-1: parameters must be on a GPU with "
        "transport='symmetric_memory', got cpu; leave transport out",
        "DisagreementError: all ranks must have the same node with transport='symmetric_memory', "
        "got node-0 on rank 0 and node-1 on rank 1",
    )
    assert ranks.run(2, fail_to_share_memory) == [sentences] * 2
