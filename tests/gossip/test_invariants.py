"""Invariants of gossip: over gloo with 2 to 4 processes, with threads where there are more."""

import pytest
import torch

from pyparallel.comm import Run
from pyparallel.gossip import ADPSGD, SGP, AllReduce, LeaderSGD, LocalSGD
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import Complete, DirectedExponential, OnePeerExponential, Ring
from tests.cases import slow
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import SMOOTH, batches, flat, start, train, train_alone, train_wrapped
from tests.local_transport import run_threads
from tests.workers import on_ranks

REGULAR = [Ring, OnePeerExponential, DirectedExponential, Complete]


def average(exchange, topology, num_rounds):
    """Return z before, z after and w of num_rounds rounds without training."""
    buffer = torch.randn(1000, generator=torch.Generator().manual_seed(exchange.rank))
    before = buffer.double()
    averaging = PushSum.of_dense([buffer], exchange, topology)
    for _ in range(num_rounds):
        averaging.after_step()
    return before, buffer.double(), float(averaging.status.weight)


def average_over_gloo(rank, topology, num_rounds):
    return average(NeighborExchange(Run()), topology, num_rounds)


def average_somewhere(ranks, topology, num_rounds):
    """Average over gloo up to four ranks, else in threads."""
    if topology.num_ranks <= 4:
        return ranks.run(topology.num_ranks, average_over_gloo, topology, num_rounds)
    return run_threads(topology.num_ranks, lambda each: average(each, topology, num_rounds))


def check_mass(results):
    assert abs(sum(weight for _, _, weight in results) - len(results)) < 1e-6
    before = sum(first for first, _, _ in results)
    after = sum(weight * last for _, last, weight in results)
    assert (after - before).norm() < 1e-6 * torch.stack([r[0] for r in results]).norm()


@pytest.mark.parametrize("num_ranks", [slow(2), 3, slow(4), slow(6)])
def test_mass_is_conserved_over_200_rounds(ranks, num_ranks):
    check_mass(average_somewhere(ranks, StarWithChords(num_ranks), 200))


@pytest.mark.parametrize("num_ranks", [slow(3), slow(4), 8])
def test_irregular_graphs_reach_the_mean_where_unweighted_averaging_fails(ranks, num_ranks):
    results = average_somewhere(ranks, StarWithChords(num_ranks), 150)
    mean = sum(first for first, _, _ in results) / num_ranks
    for _, last, _ in results:
        torch.testing.assert_close(last, mean, rtol=0, atol=1e-5)
    # x = w z: the numerator is what unweighted averaging on the same graph holds.
    assert max(float((weight * last - mean).abs().max()) for _, last, weight in results) > 0.1


def is_complete(topology):
    return topology.neighbors(0, 0).is_complete


def train_on_equal_data(rank, algorithms):
    found = []
    for algorithm in algorithms:
        model, optimizer, wrapped = start(algorithm, **SMOOTH)
        train(model, optimizer, batches(0, 10), forward=wrapped)
        wrapped.flush()
        found.append(flat(model))
    return found


@pytest.mark.parametrize("num_ranks", [slow(2), slow(3), 4, slow(8)])
def test_identical_data_give_the_single_process_trajectory(ranks, num_ranks):
    expected = train_alone(batches(0, 10), **SMOOTH)
    algorithms = [SGP(kind(num_ranks), overlap) for kind in REGULAR for overlap in (0, 1)]
    for results in ranks.run(num_ranks, train_on_equal_data, algorithms):
        for algorithm, parameters in zip(algorithms, results, strict=True):
            if is_complete(algorithm.topology):  # an all-reduce rounds its sum
                torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(parameters, expected), algorithm


def train_on_own_data(rank, algorithms):
    return [train_wrapped(algorithm, batches(rank, 12), **SMOOTH) for algorithm in algorithms]


@pytest.mark.parametrize("num_ranks", [slow(2), 3, slow(4), slow(8)])
def test_complete_equals_all_reduce(ranks, num_ranks):
    parts = zip(*(batches(rank, 12) for rank in range(num_ranks)), strict=True)
    big_batches = [tuple(map(torch.cat, zip(*each, strict=True))) for each in parts]
    expected = train_alone(big_batches, **SMOOTH)
    algorithms = [SGP(Complete(num_ranks)), AllReduce()]
    for results in ranks.run(num_ranks, train_on_own_data, algorithms):
        for parameters in results:
            torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=2e-6)


@on_ranks(1)
def test_one_rank_is_bit_equal_to_the_bare_module(rank):
    for make_optimizer, options in ((torch.optim.SGD, SMOOTH), (torch.optim.AdamW, {})):
        expected = train_alone(batches(0, 10), make_optimizer, **options)
        for algorithm in (
            SGP(Complete(1)),
            SGP(OnePeerExponential(1)),
            AllReduce(),
            ADPSGD(Ring(1)),
            LocalSGD(2),
            LeaderSGD(1, 1, 1, local_pull=0.3, global_pull=0.2),  # no loss need be recorded
        ):
            found = train_wrapped(algorithm, batches(0, 10), make_optimizer, **options)
            assert torch.equal(found, expected), (algorithm, make_optimizer)
