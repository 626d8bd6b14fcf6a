"""LocalSGD, SlowMo and DiLoCo against the papers' rules, computed for all ranks at once."""

import functools

import pytest
import torch

from pyparallel import GossipDataParallel
from pyparallel.comm import PeerError
from pyparallel.gossip import SGP, AllReduce, DiLoCo, LocalSGD, SlowMo
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring, Star
from tests.gossip.test_invariants import batches, build_model, train, train_alone, train_wrapped
from tests.workers import observe_ranks, run_ranks

STEPS, INTERVAL, RANKS = 7, 3, 3


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


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


def assert_equal_on_all_ranks(algorithm, expected, **options):
    for ours, theirs in zip(run_ranks(RANKS, train_rank, algorithm), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_local_sgd_averages_every_interval():
    expected = train_in_one_process(lambda _, average: average, momentum=0.9)
    assert_equal_on_all_ranks(LocalSGD(INTERVAL), expected)


@pytest.mark.parametrize("reset", [True, False])
def test_slowmo_follows_the_paper(reset):
    slow, lr, beta, alpha = torch.zeros(1), 0.05, 0.6, 0.8

    def outer(old, average):
        nonlocal slow
        slow = beta * slow + (old - average) / lr
        return old - alpha * lr * slow

    expected = train_in_one_process(outer, reset_momentum=reset, momentum=0.9)
    algorithm = SlowMo(None, INTERVAL, momentum=beta, outer_lr=alpha, reset_momentum=reset)
    assert_equal_on_all_ranks(algorithm, expected)


def make_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.3)


@pytest.mark.parametrize("make", [None, make_adam], ids=["nesterov", "adam"])
def test_diloco_follows_the_paper(make):
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
    assert_equal_on_all_ranks(algorithm, expected)


def train_two(rank, first, second):
    return [train_rank(rank, algorithm) for algorithm in (first, second)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SlowMo(None, INTERVAL, momentum=0.0, reset_momentum=False), LocalSGD(INTERVAL)),
        (SlowMo(SGP(Complete(3)), 1, momentum=0.0, reset_momentum=False), SGP(Complete(3))),
        (LocalSGD(1), SGP(Complete(3))),
    ],
    ids=["slowmo without momentum", "slowmo around complete", "an interval of one"],
)
def test_algorithms_that_are_equal_in_theory_are_equal(first, second):
    for one, other in run_ranks(3, train_two, first, second):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def consensus_after(rank, algorithm):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped = GossipDataParallel(model, optimizer, algorithm)
    train(model, optimizer, list(batches(rank, 6)), forward=wrapped)
    return wrapped.consensus_distance(), float(wrapped.push_sum_weight), wrapped.bytes_sent


@pytest.mark.parametrize(
    "inner", [SGP(OnePeerExponential(4)), SGP(Ring(4), overlap=1), SGP(Star(4)), SGP(Star(4), 2)],
    ids=repr,
)  # fmt: skip
def test_slowmo_reaches_exact_consensus_with_any_inner_algorithm(inner):
    outcomes = run_ranks(4, consensus_after, SlowMo(inner, 3))
    assert all(distance < 1e-6 for distance, _, _ in outcomes)
    assert sum(weight for _, weight, _ in outcomes) == pytest.approx(4)
    plain = run_ranks(4, consensus_after, inner)
    assert all(ours[2] > theirs[2] for ours, theirs in zip(outcomes, plain, strict=True))


@pytest.mark.parametrize(
    "algorithm",
    [LocalSGD(2), DiLoCo(2), SlowMo(None, 2), SlowMo(SGP(Ring(1), overlap=1), 2)],
    ids=repr,
)
def test_one_rank_trains(algorithm):
    (result,) = run_ranks(1, train_rank, algorithm)
    assert result.isfinite().all()
    if isinstance(algorithm, LocalSGD):
        assert torch.equal(result, train_alone(list(batches(0, STEPS)), momentum=0.9))


@pytest.mark.parametrize("algorithm", [LocalSGD(2), DiLoCo(2), SlowMo(SGP(Ring(2)), 2)], ids=repr)
def test_ranks_may_have_unequal_numbers_of_batches(algorithm):
    run_ranks(2, train_unequally, algorithm)


def train_unequally(rank, algorithm):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = GossipDataParallel(model, optimizer, algorithm)
    with wrapped.join():
        train(model, optimizer, list(batches(rank, 4 + 3 * rank)), forward=wrapped)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LocalSGD(0), "interval must be a positive number of steps, got 0"),
        (lambda: DiLoCo(1.5), "interval must be a positive number of steps, got 1.5"),
        (lambda: SlowMo(None, 3, momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: SlowMo(None, 3, outer_lr=0.0), "outer_lr must be positive, got 0.0"),
    ],
)
def test_invalid_options_are_an_error(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_slowmo_around_gradient_averaging_is_an_error():
    outcomes = observe_ranks(2, train_rank, SlowMo(AllReduce(), 3), time_limit=60)
    assert all("inner must be a gossip algorithm, got AllReduce" in o.error for o in outcomes)


def lose_a_rank(rank, algorithm):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = GossipDataParallel(model, optimizer, algorithm, bucket_cap_mb=1e-4)
    alone = build_model()
    mine = list(batches(rank, 3))
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.05), mine)
    train(model, optimizer, mine[:2], forward=wrapped)
    if rank == 1:
        raise KeyError("rank 1 leaves")
    with pytest.raises(PeerError, match="step 3: the all-reduce failed"):
        train(model, optimizer, mine[2:], forward=wrapped)
    return torch.equal(flat(model), flat(alone))


@pytest.mark.parametrize("algorithm", [LocalSGD(3), SlowMo(None, 3), DiLoCo(3)], ids=repr)
def test_a_failed_average_leaves_the_parameters_unchanged(algorithm):
    first, _ = observe_ranks(2, lose_a_rank, algorithm, group_timeout=10)
    assert first.value is True, first.log
