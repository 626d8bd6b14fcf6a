"""Invariants of gossip, over gloo with 2 to 8 processes."""

import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.comm import NeighborExchange
from pyparallel.gossip import SGP, AllReduce
from pyparallel.gossip.push_sum.push_sum import PushSum
from pyparallel.gossip.topology import Complete, DirectedExponential, OnePeerExponential, Ring
from tests.gossip.graphs import StarWithChords
from tests.workers import run_ranks

SIZES = [2, 3, 4, 6, 8]
SMOOTH = {"momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}


def build_model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double().float()


def batches(rank, num_steps, size=5):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(num_steps):
        yield torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def train(model, optimizer, data, forward=None):
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.mse_loss((forward or model)(inputs), targets).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_wrapped(algorithm, data, make_optimizer=torch.optim.SGD, **options):
    model = build_model()
    optimizer = make_optimizer(model.parameters(), lr=0.05, **options)
    wrapped = GossipDataParallel(model, optimizer, algorithm)
    return train(model, optimizer, data, forward=wrapped)


def train_alone(data, make_optimizer=torch.optim.SGD, **options):
    model = build_model()
    return train(model, make_optimizer(model.parameters(), lr=0.05, **options), data)


def average_purely(rank, topology, num_rounds):
    """Return z before, z after and w of num_rounds rounds without training."""
    buffer = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    before = buffer.double()
    averaging = PushSum.of_dense([buffer], NeighborExchange(), topology)
    for _ in range(num_rounds):
        averaging.after_step()
    return before, buffer.double(), float(averaging.weight)


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("kind", [OnePeerExponential, StarWithChords])
def test_mass_is_conserved_over_1000_rounds(num_ranks, kind):
    results = run_ranks(num_ranks, average_purely, kind(num_ranks), 1000)
    assert abs(sum(weight for _, _, weight in results) - num_ranks) < 1e-6
    before = sum(first for first, _, _ in results)
    after = sum(weight * last for _, last, weight in results)
    assert (after - before).norm() < 1e-6 * torch.stack([r[0] for r in results]).norm()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_one_peer_exponential_is_exact_after_log2_rounds(num_ranks):
    num_rounds = num_ranks.bit_length() - 1
    results = run_ranks(num_ranks, average_purely, OnePeerExponential(num_ranks), num_rounds)
    mean = sum(first for first, _, _ in results) / num_ranks
    for _, last, _ in results:
        torch.testing.assert_close(last, mean, rtol=0, atol=1e-6)


def average_plainly(rank, topology, num_rounds):
    """Average without push-sum weights, on the same graph with the same shares."""
    value = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    averaging = PushSum.of_dense([value], NeighborExchange(), topology)
    for _ in range(num_rounds):
        averaging.after_step()
    averaging.before_update()  # x = w z: the numerator is what unweighted averaging holds
    return value.double()


@pytest.mark.parametrize("num_ranks", [3, 4, 6, 8])
def test_irregular_graphs_reach_the_mean_where_unweighted_averaging_fails(num_ranks):
    graph = StarWithChords(num_ranks)
    results = run_ranks(num_ranks, average_purely, graph, 150)
    mean = sum(first for first, _, _ in results) / num_ranks
    for _, last, _ in results:
        torch.testing.assert_close(last, mean, rtol=0, atol=1e-5)
    plain = run_ranks(num_ranks, average_plainly, graph, 150)
    assert max(float((value - mean).abs().max()) for value in plain) > 0.1


def train_on_equal_data(rank, algorithm, options):
    return train_wrapped(algorithm, batches(0, 10), **options)


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("kind", [Ring, OnePeerExponential, DirectedExponential, Complete])
def test_identical_data_give_the_single_process_trajectory(num_ranks, kind):
    expected = train_alone(batches(0, 10), **SMOOTH)
    for parameters in run_ranks(num_ranks, train_on_equal_data, SGP(kind(num_ranks)), SMOOTH):
        assert torch.equal(parameters, expected)


def train_on_own_data(rank, algorithm, options):
    return train_wrapped(algorithm, batches(rank, 12), **options)


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("options", [{}, SMOOTH], ids=["sgd", "nesterov"])
def test_complete_equals_all_reduce(num_ranks, options):
    gossip = run_ranks(num_ranks, train_on_own_data, SGP(Complete(num_ranks)), options)
    exact = run_ranks(num_ranks, train_on_own_data, AllReduce(), options)
    big_batch = train_alone(
        [
            (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
            for parts in zip(*(batches(rank, 12) for rank in range(num_ranks)), strict=True)
        ],
        **options,
    )
    for parameters in gossip + exact:
        torch.testing.assert_close(parameters, big_batch, rtol=1e-5, atol=2e-6)


def alone_and_wrapped(rank, algorithm, make_optimizer, options):
    wrapped = train_wrapped(algorithm, batches(0, 10), make_optimizer, **options)
    return torch.equal(wrapped, train_alone(batches(0, 10), make_optimizer, **options))


@pytest.mark.parametrize(
    "algorithm",
    [SGP(kind(1)) for kind in (Ring, OnePeerExponential, DirectedExponential, Complete)]
    + [AllReduce()],
    ids=repr,
)
def test_one_rank_is_bit_equal_to_the_bare_module(algorithm):
    for make_optimizer, options in [
        (torch.optim.SGD, SMOOTH),
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {}),
    ]:
        assert run_ranks(1, alone_and_wrapped, algorithm, make_optimizer, options) == [True]


def step_on_constant_gradient(rank, topology):
    """Train with a linear loss: every gradient is 1."""
    parameter = nn.Parameter(torch.full((4,), float(rank)))
    module = nn.ParameterList([parameter])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    wrapped = GossipDataParallel(module, optimizer, SGP(topology))
    with torch.no_grad():
        parameter.fill_(float(rank))
    for _ in range(20):
        parameter.grad = torch.ones(4)
        optimizer.step()
    return float(wrapped.push_sum_weight) * parameter.detach().double()


def test_irregular_graphs_step_on_the_numerator():
    # Algorithm 1 of the paper: sum_i x_i changes by the sum of local steps, for any weights.
    results = run_ranks(5, step_on_constant_gradient, StarWithChords(5))
    steps, velocity = 0.0, 0.0
    for _ in range(20):
        velocity = 0.5 * velocity + 1
        steps += 0.1 * velocity
    expected = torch.full((4,), sum(range(5)) - 5 * steps, dtype=torch.float64)
    torch.testing.assert_close(sum(results), expected, rtol=1e-5, atol=1e-5)
