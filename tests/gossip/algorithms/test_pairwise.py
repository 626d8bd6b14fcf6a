"""Asynchronous pairwise averaging in one process, in any order of steps."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.comm import PeerError
from pyparallel.gossip.algorithms.adpsgd import adpsgd
from pyparallel.gossip.topology import BaseGraph, Complete, RandomMatching, Ring, Star
from tests.gossip.local_pairs import World

KINDS = [Ring, Star, Complete, BaseGraph, RandomMatching]
ORDERS = st.lists(st.integers(0, 7), max_size=120)


def random_values(num_ranks, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_ranks)
    return [
        [torch.randn(size, generator=generator).to(dtype) for size in (5, 3)]
        for _ in range(num_ranks)
    ]


def run(world, order):
    """Take steps in this order, each with an update; return the sum of all updates."""
    total = 0.0
    for index, number in enumerate(order):
        update = (index % 7 - 3) / 8
        world.step(number % world.num_ranks, lambda _, update=update: update)
        total += update
    return total


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(KINDS), num_ranks=st.integers(1, 8), order=ORDERS, seed=st.integers())
def test_the_sum_is_conserved_in_any_order_of_steps(kind, num_ranks, order, seed):
    values = random_values(num_ranks)
    world = World(kind(num_ranks), values, seed)
    expected = world.values().sum(0) + run(world, order)
    before = world.values()
    torch.testing.assert_close(world.as_merged().sum(0), expected, rtol=0, atol=2e-5)
    assert torch.equal(world.values(), before)
    world.flush()
    torch.testing.assert_close(world.values().sum(0), expected, rtol=0, atol=2e-5)
    assert torch.equal(world.as_merged(), world.values())  # nothing is in flight


@settings(deadline=None, max_examples=40)
@given(kind=st.sampled_from(KINDS), num_ranks=st.integers(2, 8), order=ORDERS, seed=st.integers())
def test_no_exchange_increases_the_distance_between_ranks(kind, num_ranks, order, seed):
    world = World(kind(num_ranks), random_values(num_ranks), seed)
    spread = float("inf")
    for number in order:
        world.step(number % num_ranks)
        merged = world.as_merged()
        now = float((merged - merged.mean(0)).square().sum())
        assert now <= spread + 1e-5
        spread = now


def check_mean(kind, num_ranks, pace):
    world = World(kind(num_ranks), random_values(num_ranks))
    mean = world.values().mean(0)
    generator, distance = torch.Generator().manual_seed(1), float("inf")
    for index in range(1500):
        order = torch.arange(num_ranks)
        if pace != "in order":
            order = torch.randperm(num_ranks, generator=generator)
        for rank in order.tolist():
            if pace != "one slow" or rank != 0 or index % 5 == 0:
                world.step(rank)
        if index % 20 == 0:
            distance = float((world.values() - mean).abs().max())
            if distance <= 1e-4:
                return
    raise AssertionError(f"{kind(num_ranks)}, {pace}: {distance}")


PACES = ["in order", "random order", "one slow"]


@pytest.mark.parametrize("pace", PACES)
def test_all_reach_the_mean(pace):
    sizes = itertools.islice(itertools.cycle([2, 3, 5, 8]), PACES.index(pace), None)
    for kind, num_ranks in zip(KINDS, sizes, strict=False):
        check_mean(kind, num_ranks, pace)


@pytest.mark.slow
@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_reach_the_mean_with_any_number_of_ranks(kind, pace):
    for num_ranks in (2, 3, 5, 8):
        check_mean(kind, num_ranks, pace)


def test_training_finds_the_minimum_of_all_data():
    world = World(Ring(4), random_values(4))
    targets = [3.0, -1.0, 0.5, 5.5]
    generator = torch.Generator().manual_seed(2)
    for index in range(1000):
        lr = 0.05 * (1 - index / 1000)
        for rank in torch.randperm(4, generator=generator).tolist():
            world.step(rank, lambda z, lr=lr, rank=rank: lr * (targets[rank] - z))
    world.flush()
    torch.testing.assert_close(
        world.values(), torch.full((4, 8), 2.0, dtype=torch.float64), rtol=0, atol=0.03
    )


def test_an_exchange_averages_two_ranks_whatever_updates_there_are_meanwhile():
    world = World(Complete(2), random_values(2))
    x, sent, generator = list(world.values()), None, torch.Generator().manual_seed(8)
    for step in range(12):
        for rank in range(2):
            if rank == 1 and step % 2:  # it has received the request, and replies
                x[0], x[1] = adpsgd(sent, x[0], x[1])
            update = float(torch.randn((), generator=generator))
            world.step(rank, lambda _, update=update: update)
            x[rank] = x[rank] + update
            if rank == 0 and step % 2 == 0:  # it has applied the reply, and sends the next request
                sent = x[0]
            torch.testing.assert_close(world.as_merged(), torch.stack(x), rtol=0, atol=2e-6)


def test_16_bit_buffers_conserve_the_sum_up_to_rounding():
    for dtype in (torch.bfloat16, torch.float16):
        world = World(Ring(4), random_values(4, dtype))
        expected = world.values().sum(0)
        for _ in range(50):
            for rank in range(4):
                world.step(rank)
        world.flush()
        torch.testing.assert_close(world.values().sum(0), expected, rtol=0, atol=0.06)
        assert (world.values() - expected / 4).abs().max() < 0.03, dtype


@settings(deadline=None, max_examples=30)
@given(num_ranks=st.integers(1, 6), order=ORDERS, more=ORDERS, later=ORDERS)
def test_a_checkpoint_conserves_the_sum_and_changes_nothing(num_ranks, order, more, later):
    world = World(Complete(num_ranks), random_values(num_ranks))
    run(world, order)
    expected = world.as_merged()
    states = [averager.state_dict() for averager in world.averagers]
    saved = [[buffer.clone() for buffer in buffers] for buffers in world.buffers]
    run(world, more)
    for other in (world, World(Complete(num_ranks), saved)):
        for buffers, values in zip(other.buffers, saved, strict=True):
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
        other.load(states)
        assert torch.equal(other.as_merged(), expected)
        total = run(other, later)
        other.flush()
        after = other.values().sum(0)
        torch.testing.assert_close(after, expected.sum(0) + total, rtol=0, atol=2e-5)


class Broken:
    """A message whose peer has died."""

    def wait(self, kind=None):
        raise PeerError("rank 0, step 0: the message on edge 0 -> 1 was not delivered")


def test_a_dead_peer_is_an_error_after_the_timeout_and_in_every_later_call():
    world = World(Ring(2), random_values(2))
    averager = world.averagers[0]
    averager.exchange.start = lambda *_, **__: Broken()
    world.step(0)
    world.step(0)  # within the timeout: does not wait
    averager._timeout = -1.0
    with pytest.raises(PeerError, match="edge 0 -> 1"):
        world.step(0)
    for call in (averager.before_step, averager.after_step, averager.flush, averager.as_merged):
        with pytest.raises(PeerError, match="edge 0 -> 1"):
            call()
