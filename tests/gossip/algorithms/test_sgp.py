"""SGP and OSGP, whose rounds overlap with the next steps, against the paper's rule."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import SGP
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import (
    BaseGraph,
    Complete,
    DirectedExponential,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
)
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import take_step
from tests.gossip.test_invariants import batches, build_model, train, train_alone
from tests.local_transport import run_threads
from tests.workers import run_ranks

KINDS = [Ring, OnePeerExponential, DirectedExponential, Complete, BaseGraph, RandomMatching]
IRREGULAR = [Star, StarWithChords]
LR = 0.1


def gradient(target, z):
    return z - target


def run_steps(topology, overlap, num_steps, lr=LR):
    """Descend towards a different target on each rank; return z and w after steps and flushed."""

    def rank_main(exchange):
        generator = torch.Generator().manual_seed(exchange.rank)
        target = torch.randn(3, generator=generator, dtype=torch.float64).float()
        parameter = nn.Parameter(torch.zeros(3))
        averager = PushSum.of_dense([parameter.data], exchange, topology, overlap)
        optimizer = torch.optim.SGD([parameter], lr=lr)
        history = []
        for _ in range(num_steps):
            parameter.grad = gradient(target, parameter.detach().clone())
            take_step(averager, optimizer)
            history.append((parameter.detach().double().numpy().copy(), float(averager.weight)))
        merged, weight = averager.as_merged()
        merged, weight = merged[0].double().numpy().copy(), float(weight)
        averager.flush()
        after = parameter.detach().double().numpy(), float(averager.weight)
        return target.double().numpy(), history, (merged, weight), after

    return run_threads(topology.num_ranks, rank_main)


def simulate(topology, overlap, num_steps, targets, lr=LR):
    """Simulate the same with float64 matrices: numerators x, weights w and messages in flight."""
    x, w = np.zeros_like(targets), np.ones(len(targets))
    sent, index, age, history = None, 0, 0, []
    for _ in range(num_steps):
        z = x / w[:, None]
        age += 1
        if sent is not None and age >= overlap:
            x, w, sent = x + sent[0], w + sent[1], None
        x = x - lr * gradient(targets, z)
        if sent is None:
            matrix = topology.mixing_matrix(index)
            kept = np.diag(np.diag(matrix))
            sent = (matrix - kept) @ x, (matrix - kept) @ w
            x, w = kept @ x, kept @ w
            index, age = index + 1, 0
            if overlap == 0:
                x, w, sent = x + sent[0], w + sent[1], None
        history.append((x / w[:, None], w))
    return history


@pytest.mark.parametrize("overlap", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", [*KINDS, *IRREGULAR])
def test_follows_the_papers_rule(kind, overlap):
    topology = kind(5)
    results = run_steps(topology, overlap, 25)
    expected = simulate(topology, overlap, 25, np.stack([target for target, *_ in results]))
    for rank, (_, history, _, _) in enumerate(results):
        for step, (z, weight) in enumerate(history):
            assert weight == pytest.approx(expected[step][1][rank], abs=1e-12)
            np.testing.assert_allclose(z, expected[step][0][rank], rtol=2e-5, atol=2e-6)


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from([*KINDS, *IRREGULAR]),
    num_ranks=st.integers(1, 8),
    overlap=st.integers(0, 5),
    num_steps=st.integers(0, 17),
)
def test_mass_is_conserved_with_messages_in_flight(kind, num_ranks, overlap, num_steps):
    results = run_steps(kind(num_ranks), overlap, num_steps, lr=0.0)
    for place in (2, 3):  # as if merged, and merged
        assert sum(result[place][1] for result in results) == pytest.approx(num_ranks, abs=1e-9)
    for merged, after in (result[2:] for result in results):
        np.testing.assert_array_equal(merged[0], after[0])
        assert merged[1] == after[1]


def average_with_delays(exchange, topology, delays):
    buffer = torch.randn(40, generator=torch.Generator().manual_seed(exchange.rank))
    before = buffer.double()
    averaging = PushSum.of_dense([buffer], exchange, topology)
    for delay in delays[exchange.rank]:
        averaging.send()
        time.sleep(delay)
        averaging.merge()
    return before, buffer.double(), float(averaging.weight)


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_delays_and_orders_do_not_change_the_result(data):
    kind = data.draw(st.sampled_from([*KINDS, *IRREGULAR]))
    delay = st.sampled_from([0.0, 0.0, 0.001, 0.004])
    delays = data.draw(st.lists(st.lists(delay, min_size=6, max_size=6), min_size=4, max_size=4))
    slow = run_threads(4, lambda exchange: average_with_delays(exchange, kind(4), delays))
    fast = run_threads(4, lambda exchange: average_with_delays(exchange, kind(4), [[0.0] * 6] * 4))
    for a, b in zip(slow, fast, strict=True):
        assert torch.equal(a[1], b[1])
        assert a[2] == b[2]


def test_weights_are_one_at_every_update_with_overlap_one():
    seen = []

    def rank_main(exchange):
        averager = PushSum.of_dense([torch.zeros(3)], exchange, OnePeerExponential(4), overlap=1)
        for _ in range(10):
            averager.before_step()
            seen.append(float(averager.weight))
            averager.after_step()

    run_threads(4, rank_main)
    assert seen == [1.0] * 40


@pytest.mark.parametrize("overlap", [-1, 1.5, "1"])
def test_an_invalid_overlap_is_an_error(overlap):
    with pytest.raises(ValueError, match="overlap must be a number of steps, at least 0, got"):
        SGP(Ring(2), overlap=overlap)


def train_identically(rank, overlap, kind):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    algorithm = SGP(kind(torch.distributed.get_world_size()), overlap=overlap)
    wrapped = GossipDataParallel(model, optimizer, algorithm)
    result = train(model, optimizer, list(batches(0, 12)), forward=wrapped)
    wrapped.flush()
    flushed = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return result, flushed


@pytest.mark.parametrize("kind", [OnePeerExponential, Ring, Complete])
def test_identical_data_equals_training_alone_bit_for_bit(kind):
    alone = train_alone(list(batches(0, 12)), momentum=0.9)
    for result, flushed in run_ranks(3, train_identically, 1, kind):
        assert torch.equal(result, alone)
        assert torch.equal(flushed, alone)


def see_consensus(rank, overlap):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = GossipDataParallel(model, optimizer, SGP(Ring(4), overlap=overlap))
    mine = list(batches(rank, 9))
    train(model, optimizer, mine[:5], forward=wrapped)
    weight = float(wrapped.push_sum_weight)
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    with wrapped.consensus() as averaged:
        mean = torch.cat([parameter.detach().flatten() for parameter in averaged.parameters()])
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    distance = wrapped.consensus_distance()
    train(model, optimizer, mine[5:], forward=wrapped)  # nothing has changed
    wrapped.flush()
    return weight, before, mean, after, distance, float(wrapped.push_sum_weight)


@pytest.mark.parametrize("overlap", [1, 4])
def test_consensus_includes_messages_in_flight_and_changes_nothing(overlap):
    outcomes = run_ranks(4, see_consensus, overlap)
    means = [mean for _, _, mean, _, _, _ in outcomes]
    for weight, before, mean, after, distance, weight_after in outcomes:
        assert weight == pytest.approx(1 / 3, abs=1e-9)
        assert torch.equal(before, after)
        torch.testing.assert_close(mean, means[0])
        assert 0 < distance < 1
        assert weight_after == 1.0


def sleep_once(rank, overlap):
    """Return the seconds of each step; rank 1 sleeps once, in step 3."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = GossipDataParallel(model, optimizer, SGP(Ring(2), overlap=overlap))
    seconds = []
    for step, data in enumerate(batches(rank, 9)):
        begin = time.monotonic()
        if rank == 1 and step == 3:
            time.sleep(4.0)
        train(model, optimizer, [data], forward=wrapped)
        seconds.append(time.monotonic() - begin)
    wrapped.flush()
    return seconds


@pytest.mark.parametrize(("overlap", "blocked"), [(0, 3), (1, 4), (4, 8)])
def test_a_sleeping_peer_blocks_the_other_only_after_overlap_steps(overlap, blocked):
    # Rounds start after steps 0, tau, 2 tau, ...; the first one after step 3 is delayed.
    seconds, _ = run_ranks(2, sleep_once, overlap)
    assert max(range(9), key=seconds.__getitem__) == blocked
