"""SGP against Algorithm 1 of Assran et al.; with overlap against combine-while-adapt."""

import time
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import OSGP, SGP
from pyparallel.gossip.algorithms.sgp import combine_while_adapt, sgp
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import (
    BaseGraph,
    Complete,
    DirectedExponential,
    OnePeerExponential,
    Phases,
    RandomMatching,
    Ring,
    Star,
)
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import batches, flat, start, take_step, train
from tests.local_transport import run_threads

KINDS = [Ring, OnePeerExponential, DirectedExponential, Complete, BaseGraph, RandomMatching]


def in_phases(num_ranks):
    """Return a topology whose number of peers changes: the authors' code lost mass then."""
    sparse = OnePeerExponential(num_ranks)
    return Phases([(sparse, 2 * sparse.period), (Complete(num_ranks), 3), (Star(num_ranks), None)])


IRREGULAR = [Star, StarWithChords, in_phases]
LR = 0.1


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
            parameter.grad = parameter.detach() - target
            take_step(averager, optimizer)
            history.append(
                (parameter.detach().double().numpy().copy(), float(averager.status.weight))
            )
        merged, weight = averager.as_merged()
        merged, weight = merged[0].double().numpy().copy(), float(weight)
        averager.flush()
        after = parameter.detach().double().numpy(), float(averager.status.weight)
        return target.double().numpy(), history, (merged, weight), after

    return run_threads(topology.num_ranks, rank_main)


def algorithm_1(topology, num_steps, targets):
    """Return z and w of all ranks after each step of Algorithm 1 of Assran et al., in float64."""
    x, w, history = torch.zeros_like(targets), torch.ones(len(targets), 1).double(), []
    for step in range(num_steps):
        matrix = torch.from_numpy(topology.mixing_matrix(step))
        x, w = sgp(x, w, lambda z: LR * (z - targets), matrix)
        history.append((x / w, w))
    return history


def with_overlap(topology, overlap, num_steps, targets):
    """Return z and w of all ranks after each step of combine-while-adapt, in float64."""
    x, w = torch.zeros_like(targets), torch.ones(len(targets), 1).double()
    in_flight, index, age, history = None, 0, 0, []
    for _ in range(num_steps):
        age += 1
        merges = in_flight is not None and age >= overlap
        sends = merges or in_flight is None
        matrix = torch.from_numpy(topology.mixing_matrix(index)) if sends else None
        x, w, in_flight = combine_while_adapt(
            x, w, in_flight, lambda z: LR * (z - targets), matrix, merges=merges
        )
        if sends:
            index, age = index + 1, 0
        history.append((x / w, w))
    return history


def check_steps(topology, overlap, simulate):
    results = run_steps(topology, overlap, 25)
    expected = simulate(torch.stack([torch.from_numpy(target) for target, *_ in results]))
    z, weights = (torch.stack(each) for each in zip(*expected, strict=True))
    for rank, (_, history, _, _) in enumerate(results):
        place = f"{topology}, rank {rank}"
        ours, weight = zip(*history, strict=True)
        np.testing.assert_allclose(weight, weights[:, rank, 0], 0, 1e-12, err_msg=place)
        np.testing.assert_allclose(ours, z[:, rank], 2e-5, 2e-6, err_msg=place)


def test_sgp_is_algorithm_1_of_assran_et_al():
    for kind in [*KINDS, *IRREGULAR]:
        check_steps(kind(5), 0, partial(algorithm_1, kind(5), 25))


@pytest.mark.parametrize("overlap", [1, 2, 4])
def test_overlap_is_combine_while_adapt(overlap):
    for kind in [*KINDS, *IRREGULAR]:
        check_steps(kind(5), overlap, partial(with_overlap, kind(5), overlap, 25))


@settings(deadline=None, max_examples=25)
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
    return before, buffer.double(), float(averaging.status.weight)


@settings(deadline=None, max_examples=8)
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


SEEN = [
    SGP(Ring(4), overlap=1),
    SGP(Ring(4), overlap=4),
    OSGP(Complete(4)),
    OSGP(OnePeerExponential(4), 2, biased=True),
]


def see_consensus(rank, algorithm):
    """Return the consensus and the flushed parameters, while a message is in flight."""
    model, optimizer, wrapped = start(algorithm)
    before = train(model, optimizer, batches(rank, 5), forward=wrapped)
    with wrapped.consensus() as averaged:
        mean = flat(averaged)
    assert torch.equal(before, flat(model)), algorithm
    assert 0 < wrapped.consensus_distance() < 1, algorithm
    wrapped.flush()
    assert float(wrapped.push_sum_weight) == pytest.approx(1, abs=1e-9), algorithm
    return mean, flat(model), before


def test_the_consensus_includes_messages_in_flight_and_changes_nothing(ranks):
    cases = [(algorithm,) for algorithm in SEEN]
    for (algorithm,), outcomes in zip(cases, ranks.run_each(4, see_consensus, cases), strict=True):
        means, flushed, before = (torch.stack(each) for each in zip(*outcomes, strict=True))
        for mean in means:
            torch.testing.assert_close(mean, flushed.mean(0), msg=str(algorithm))
        assert not torch.equal(flushed, before), algorithm


def delay_a_step(rank, name, algorithm, blocked):
    """Rank 1 delays its step 3 until rank 0 has taken all steps before ``blocked``.

    Return whether rank 0's step ``blocked`` ended after rank 1's step 3 began.
    """
    still, begins = f"not blocked so far {name}", f"begins step 3 {name}"
    model, optimizer, wrapped = start(algorithm)
    store = dist.group.WORLD.get_group_store()
    waited = None
    for step, data in enumerate(batches(rank, 9)):
        if rank == 0 and step == blocked:
            store.set(still, "")
        if rank == 1 and step == 3:
            store.wait([still])
            time.sleep(0.1)  # rank 0 would end its step meanwhile if it did not wait
            store.set(begins, "")
        train(model, optimizer, [data], forward=wrapped)
        if rank == 0 and step == blocked:
            waited = store.check([begins])
    wrapped.flush()
    return waited


DELAYED = [  # and the step of rank 0 that waits
    (SGP(Ring(2)), 3),
    (SGP(Ring(2), overlap=1), 4),
    (SGP(Ring(2), overlap=4), 8),
    (OSGP(Ring(2)), 4),
    (OSGP(Ring(2), 4), 8),
]


def test_a_sleeping_peer_blocks_the_other_only_after_overlap_steps(ranks):
    # Rounds start after steps 0, tau, 2 tau, ...; the first one after step 3 is delayed.
    cases = [(name, *case) for name, case in enumerate(DELAYED)]
    assert ranks.run_each(2, delay_a_step, cases) == [(True, None)] * len(DELAYED)


DENSE_ROUNDS = 2
HEADER_BYTES = 64


def send_dense_rounds(rank, overlap, dtype):
    """Return the bytes of the bucket, of each step, and the parameters at the end."""
    schedule = Phases([(Complete(4), DENSE_ROUNDS), (OnePeerExponential(4), None)])
    torch.manual_seed(0)
    model = nn.Linear(64, 32).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = GossipDataParallel(model, optimizer, SGP(schedule, overlap=overlap))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    sent = [0]
    for _ in range(DENSE_ROUNDS + 2):
        wrapped(torch.zeros(1, 64, dtype=dtype)).sum().backward()
        optimizer.step()
        sent.append(wrapped.bytes_sent)
    wrapped.flush()
    return wrapped._buckets.num_bytes, np.diff(sent).tolist(), flat(model)


def test_a_complete_round_sends_the_bytes_of_a_ring_all_reduce(ranks):
    ways = (0, torch.float32), (1, torch.float32), (1, torch.bfloat16)
    *of_float32, of_16_bits = ranks.run_each(4, send_dense_rounds, ways)
    for size, sent, values in chain(*of_float32):
        dense = 2 * 3 * size // 4 + 3 * HEADER_BYTES
        assert sent == [dense] * DENSE_ROUNDS + [size + HEADER_BYTES] * 2
        torch.testing.assert_close(values, torch.full_like(values, 1.5))
    for size, sent, values in of_16_bits:
        assert sent[0] == 3 * (size + HEADER_BYTES)  # a message to each
        assert torch.equal(values, torch.full_like(values, 1.5))
