"""AD-PSGD over gloo: stragglers do not block, the sum is conserved, a dead rank ends all."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.comm import Run
from pyparallel.gossip import ADPSGD
from pyparallel.gossip.topology import Complete, Ring, Star
from tests.cases import slow
from tests.gossip.loops import SMOOTH, batches, start, train, train_alone
from tests.workers import observe_ranks

LR = 0.1


def wrap_parameter(rank, topology, size=1000, **options):
    """Wrap one flat parameter, with different values on each rank."""
    parameter = nn.Parameter(torch.zeros(size))
    module = nn.ParameterList([parameter])
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    wrapped = GossipDataParallel(module, optimizer, ADPSGD(topology), **options)
    with torch.no_grad():
        parameter.copy_(torch.randn(size, generator=torch.Generator().manual_seed(rank)))
    return wrapped, optimizer, parameter


def step(optimizer, parameter):
    """Take a step of exactly -LR for any z: the sum over ranks counts the steps."""
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def conserve(rank, topology, num_steps):
    """Return z before, the consensus midway, if z was unchanged by it, z flushed, and the bytes."""
    wrapped, optimizer, parameter = wrap_parameter(rank, topology)
    before = parameter.detach().double()
    for _ in range(num_steps):
        step(optimizer, parameter)
        time.sleep(0.001 * (rank % 3))
    mine = parameter.detach().clone()
    with wrapped.consensus():
        middle = parameter.detach().double()
    unchanged = torch.equal(parameter, mine)
    for _ in range(num_steps):
        step(optimizer, parameter)
    wrapped.flush()
    return before, middle, unchanged, parameter.detach().double(), wrapped.bytes_sent


@pytest.mark.parametrize("kind", [slow(Ring), Complete, Star])
@pytest.mark.parametrize(("num_ranks", "num_steps"), [(4, 30), slow(8, 60)])
def test_the_sum_is_conserved(ranks, kind, num_ranks, num_steps):
    topology = kind(num_ranks)
    results = ranks.run(num_ranks, conserve, topology, num_steps)
    mean = sum(before for before, *_ in results) / num_ranks
    for _, middle, unchanged, _, bytes_sent in results:
        torch.testing.assert_close(middle, mean - LR * num_steps, rtol=0, atol=1e-4)
        assert unchanged
        assert bytes_sent > 0
    after = sum(after for *_, after, _ in results) / num_ranks
    torch.testing.assert_close(after, mean - 2 * LR * num_steps, rtol=0, atol=1e-4)


def train_unequally(rank, topology):
    wrapped, optimizer, parameter = wrap_parameter(rank, topology)
    before = parameter.detach().double()
    for epoch in range(2):
        with wrapped.join():
            for _ in range(10 + 15 * ((rank + epoch) % 3)):
                step(optimizer, parameter)
    wrapped.flush()
    return before, parameter.detach().double()


def test_ranks_may_have_unequal_numbers_of_batches(ranks):
    for num_ranks in (1, 4):
        results = ranks.run(num_ranks, train_unequally, Ring(num_ranks))
        num_steps = sum(10 + 15 * ((r + epoch) % 3) for r in range(num_ranks) for epoch in (0, 1))
        before, after = (sum(values) for values in zip(*results, strict=True))
        torch.testing.assert_close(after, before - LR * num_steps, rtol=0, atol=1e-3)


def reply_after_the_last_batch(rank):
    """Rank 1 has one batch; rank 0 trains until it has received three replies."""
    wrapped, optimizer, parameter = wrap_parameter(rank, Ring(2))
    replied = 0
    with wrapped.join():
        step(optimizer, parameter)
        while rank == 0 and replied < 3:
            before = parameter.detach().clone()
            step(optimizer, parameter)
            replied += not torch.allclose(parameter, before - LR)
            time.sleep(0.01)
    return replied


def test_a_rank_without_batches_still_replies(ranks):
    assert ranks.run(2, reply_after_the_last_batch) == [3, 0]


def sleep_until_the_others_have_finished(rank, joined):
    """The last rank sleeps in a step until the others have finished all of theirs."""
    wrapped, optimizer, parameter = wrap_parameter(rank, Ring(4))
    store = dist.group.WORLD.get_group_store()
    with wrapped.join(enable=joined):
        for index in range(50):
            if rank == 3 and index == 5:
                store.wait(["done/0", "done/1", "done/2"])
            step(optimizer, parameter)
        store.set(f"done/{rank}", "")
    return wrapped.consensus_distance()


@pytest.mark.parametrize("joined", [False, True])
def test_a_sleeping_rank_does_not_block_the_others(ranks, joined):
    distances = ranks.run(4, sleep_until_the_others_have_finished, joined)
    assert len(set(distances)) == 1


def train_on_the_same_data(rank, topology):
    model, optimizer, wrapped = start(ADPSGD(topology), **SMOOTH)
    for batch in batches(0, 10):
        result = train(model, optimizer, [batch], forward=wrapped)
        wrapped.flush()
    return result, wrapped.bytes_sent


def test_identical_data_in_lockstep_give_the_single_process_trajectory(ranks):
    expected = train_alone(batches(0, 10), **SMOOTH)
    for parameters, bytes_sent in ranks.run(4, train_on_the_same_data, Complete(4)):
        assert torch.equal(parameters, expected)
        assert bytes_sent > 0


def exit_with_requests_in_flight(rank):
    wrapped, optimizer, parameter = wrap_parameter(rank, Ring(4), size=300_000)
    for _ in range(7 + rank):
        step(optimizer, parameter)
    distance = wrapped.consensus_distance()
    step(optimizer, parameter)
    dist.barrier()
    return distance


@pytest.mark.slow
def test_ranks_may_exit_with_requests_in_flight():
    outcomes = observe_ranks(4, exit_with_requests_in_flight)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcome.exit_code for outcome in outcomes] == [0] * 4


def train_in_a_subgroup(rank):
    group = dist.new_group([1, 3])
    if rank in (0, 2):
        return None
    wrapped, optimizer, parameter = wrap_parameter(rank, Ring(2), process_group=group)
    for _ in range(30):
        step(optimizer, parameter)
    wrapped.flush()
    return parameter.detach().double()


def test_a_subgroup_trains_alone(ranks):
    _, one, _, three = ranks.run(4, train_in_a_subgroup)
    generators = [torch.Generator().manual_seed(rank) for rank in (1, 3)]
    before = sum(torch.randn(1000, generator=generator).double() for generator in generators)
    torch.testing.assert_close(one + three, before - 2 * 30 * LR, rtol=0, atol=1e-4)


def test_other_devices_are_an_error():
    buckets = SimpleNamespace(buffers=[torch.zeros(2, device="meta")])
    with pytest.raises(ValueError, match=r"parameters must be on the CPU for ADPSGD, .* got meta"):
        ADPSGD(Ring(2)).start(nn.Linear(1, 1), None, buckets, Run())
