"""SMs that matrix products leave free while a round is in flight, also if it fails."""

from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm import PeerError
from pyparallel.gossip.messages import exchange
from pyparallel.gossip.messages.sm_carveout import num_network_sms
from tests.local_transport import LocalExchange


@pytest.fixture
def carveout(monkeypatch):
    """Return what was set, the newest last."""
    found = [None]
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", found.append, raising=False)
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: found[-1], raising=False)
    monkeypatch.setattr(exchange, "num_network_sms", lambda group: 2)
    return found


def swap(round_of=lambda rank: 0):
    """Return the rounds of two ranks, which exchange a message."""
    queues = {(i, j): SimpleQueue() for i in range(2) for j in range(2)}
    return [
        LocalExchange(queues, rank, 2).swap(
            [torch.ones(3)], [1 - rank], [1 - rank], round_index=round_of(rank)
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize("before", [None, 1, 8])
def test_products_leave_sms_free_while_rounds_are_in_flight(carveout, before):
    carveout[:] = [before]
    rounds = [*swap(), *swap()]
    for each in rounds:
        assert carveout[-1] == max(2, before or 0)
        each.wait()
        each.wait()
    assert carveout[-1] == before


def test_none_stay_free_after_a_round_that_fails_or_is_dropped(carveout):
    for each in swap(round_of=int):
        assert carveout[-1] == 2
        with pytest.raises(PeerError, match="round"):
            each.wait()
    assert carveout[-1] is None
    rounds = swap()
    assert carveout[-1] == 2
    del rounds
    assert carveout[-1] is None


def test_a_torch_without_a_carveout_has_none(monkeypatch, carveout):
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    for each in swap():
        each.wait()
    assert carveout == [None]


def test_only_ranks_of_different_nodes_wait_for_a_network(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda ranks: ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for backend, ranks, count in (
        *(("nccl", [0, 1], 0), ("nccl", [1, 2], 2), ("nccl", [0, 1, 2], 0), ("nccl", [0], 0)),
        ("gloo", [1, 2], 0),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda _, b=backend: b)
        assert num_network_sms(ranks) == count
