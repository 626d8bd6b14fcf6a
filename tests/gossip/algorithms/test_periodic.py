"""LocalSGD, SlowMo and DiLoCo against the papers' rules, computed for all ranks at once."""

import functools

import pytest
import torch

from pyparallel.comm import PeerError
from pyparallel.gossip import SGP, DiLoCo, LocalSGD, SlowMo
from pyparallel.gossip.algorithms.periodic import local_sgd
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring, Star
from tests.gossip.loops import batches, build_model, flat, start, train, train_alone, train_wrapped

STEPS, INTERVAL, RANKS = 7, 3, 3


def assign(model, vector):
    torch.nn.utils.vector_to_parameters(vector.clone(), model.parameters())


def train_in_one_process(outer, reset_momentum=False, **options):
    """Train all ranks in turn; all continue from outer(x_old, average)."""
    models = [build_model() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, **options) for model in models]
    data = [list(batches(rank, STEPS)) for rank in range(RANKS)]
    old = flat(models[0])
    for step in range(STEPS):
        for rank in range(RANKS):
            train(models[rank], optimizers[rank], [data[rank][step]])
        if (step + 1) % INTERVAL == 0:
            old = outer(old, sum(flat(model) for model in models) / RANKS)
            for model, optimizer in zip(models, optimizers, strict=True):
                assign(model, old)
                for state in optimizer.state.values() if reset_momentum else ():
                    state["momentum_buffer"].zero_()
    return [flat(model) for model in models]


def train_rank(rank, algorithm, momentum=0.9):
    return train_wrapped(algorithm, list(batches(rank, STEPS)), momentum=momentum)


def assert_equal_on_all_ranks(ranks, algorithm, expected):
    for ours, theirs in zip(ranks.run(RANKS, train_rank, algorithm), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_local_sgd_averages_every_interval(ranks):
    models = [build_model() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    for step, data in enumerate(zip(*(batches(rank, STEPS) for rank in range(RANKS)), strict=True)):
        x = torch.stack(list(map(train, models, optimizers, [[each] for each in data])))
        for model, vector in zip(models, local_sgd(x, step + 1, INTERVAL), strict=True):
            assign(model, vector)
    assert_equal_on_all_ranks(ranks, LocalSGD(INTERVAL), map(flat, models))


@pytest.mark.parametrize("reset", [True, False])
def test_slowmo_follows_the_paper(ranks, reset):
    slow, lr, beta, alpha = torch.zeros(1), 0.05, 0.6, 0.8

    def outer(old, average):
        nonlocal slow
        slow = beta * slow + (old - average) / lr
        return old - alpha * lr * slow

    expected = train_in_one_process(outer, reset_momentum=reset, momentum=0.9)
    algorithm = SlowMo(None, INTERVAL, momentum=beta, outer_lr=alpha, reset_momentum=reset)
    assert_equal_on_all_ranks(ranks, algorithm, expected)


def make_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.3)


@pytest.mark.parametrize("make", [None, make_adam], ids=["nesterov", "adam"])
def test_diloco_follows_the_paper(ranks, make):
    anchor = torch.nn.Parameter(flat(build_model()))
    optimizer = (make or functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True))(
        [anchor]
    )

    def outer(old, average):
        anchor.grad = old - average
        optimizer.step()
        return anchor.detach().clone()

    expected = train_in_one_process(outer, momentum=0.9)
    algorithm = DiLoCo(INTERVAL, make) if make else DiLoCo(INTERVAL)
    assert_equal_on_all_ranks(ranks, algorithm, expected)


def test_algorithms_that_are_equal_in_theory_are_equal(ranks):
    algorithms = [
        SlowMo(None, INTERVAL, momentum=0.0, reset_momentum=False),
        LocalSGD(INTERVAL),
        SlowMo(SGP(Complete(3)), 1, momentum=0.0, reset_momentum=False),
        SGP(Complete(3)),
        LocalSGD(1),
    ]
    results = ranks.run_each(3, train_rank, [(algorithm,) for algorithm in algorithms])
    slowmo, local, inner, sgp, exact = map(torch.stack, results)
    for one, other in [(slowmo, local), (inner, sgp), (exact, sgp)]:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def consensus_after(rank, algorithm):
    model, optimizer, wrapped = start(algorithm, momentum=0.9)
    train(model, optimizer, list(batches(rank, 6)), forward=wrapped)
    return wrapped.consensus_distance(), float(wrapped.push_sum_weight)


def test_slowmo_reaches_exact_consensus_with_any_inner_algorithm(ranks):
    inner = SGP(Ring(4)), SGP(OnePeerExponential(4), overlap=1), SGP(Star(4), overlap=2)
    results = ranks.run_each(4, consensus_after, [(SlowMo(each, 3),) for each in inner])
    for algorithm, found in zip(inner, results, strict=True):
        assert all(distance < 1e-6 for distance, _ in found), algorithm
        assert sum(weight for _, weight in found) == pytest.approx(4), algorithm


def lose_a_rank(rank, algorithms):
    """Return whether parameters are unchanged by the average of ranks of which one has left."""
    unchanged = []
    mine = list(batches(rank, 3))
    expected = train_alone(mine)
    trainers = [start(algorithm, cap=1e-4) for algorithm in algorithms]
    for model, optimizer, wrapped in trainers:
        train(model, optimizer, mine[:2], forward=wrapped)
    if rank == 1:
        raise KeyError("rank 1 leaves")
    for model, optimizer, wrapped in trainers:
        with pytest.raises(PeerError, match="step 3: the all-gather failed"):
            train(model, optimizer, mine[2:], forward=wrapped)
        unchanged.append(torch.equal(flat(model), expected))
    return unchanged


def test_a_failed_average_leaves_the_parameters_unchanged(ranks):
    algorithms = [LocalSGD(3), SlowMo(None, 3), DiLoCo(3)]
    first, _ = ranks.observe(2, lose_a_rank, algorithms, group_timeout=10)
    assert first.value == [True] * 3, first.log
