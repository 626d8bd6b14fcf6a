"""Hierarchical: a node gossips like one rank that trains on all the node's batches."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.comm import FlatBuckets
from pyparallel.gossip import SGP, AllReduce, DiLoCo, Hierarchical, LeaderSGD, NoLoCo, SlowMo
from pyparallel.gossip.topology import Complete, OnePeerExponential, RandomMatching, Ring, Star
from tests.gossip.test_invariants import SMOOTH, batches, build_model, train, train_wrapped
from tests.workers import observe_ranks, run_ranks

STEPS = 10


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def start(algorithm, make_optimizer=torch.optim.SGD, cap=25.0, **options):
    model = build_model()
    optimizer = make_optimizer(model.parameters(), lr=0.05, **options)
    return model, optimizer, GossipDataParallel(model, optimizer, algorithm, bucket_cap_mb=cap)


def train_rank(rank, algorithm, options, cap=25.0):
    """Return the parameters after every step, flushed and averaged, and the push-sum weight."""
    model, optimizer, wrapped = start(algorithm, cap=cap, **options)
    history = [train(model, optimizer, [data], wrapped) for data in batches(rank, STEPS)]
    weight = float(wrapped.push_sum_weight)
    with wrapped.consensus() as averaged:
        mean = flat(averaged)
    wrapped.flush()
    return [*history, flat(model), mean], weight


def train_nodes(rank, algorithm, options, ranks_per_node):
    """Train the same with one rank for each node."""
    parts = [batches(rank * ranks_per_node + local, STEPS) for local in range(ranks_per_node)]
    data = [tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(*parts, strict=True)]
    model, optimizer, wrapped = start(algorithm, **options)
    history = [train(model, optimizer, [each], wrapped) for each in data]
    weight = float(wrapped.push_sum_weight)
    with wrapped.consensus() as averaged:
        mean = flat(averaged)
    wrapped.flush()
    return [*history, flat(model), mean], weight


INNER = [
    SGP(Ring(2)),
    SGP(OnePeerExponential(2), overlap=1),
    SGP(Star(2), overlap=3),
    SlowMo(SGP(Ring(2), overlap=1), 3),
    DiLoCo(4),
    NoLoCo(RandomMatching(2), 4),
]


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_nodes_train_like_single_ranks_with_all_their_batches(inner):
    options = {"momentum": 0.9}
    results = run_ranks(4, train_rank, Hierarchical(inner, 2), options)
    expected = run_ranks(2, train_nodes, inner, options, 2)
    for rank, (history, weight) in enumerate(results):
        theirs, its_weight = expected[rank // 2]
        assert weight == its_weight
        for ours, other in zip(history, theirs, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)
        neighbor = results[rank ^ 1][0]
        assert all(torch.equal(a, b) for a, b in zip(history, neighbor, strict=True))


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(6, 3), (6, 2), (8, 4)], ids=str)
def test_other_sizes_with_small_buckets(num_ranks, ranks_per_node):
    num_nodes = num_ranks // ranks_per_node
    inner = SGP(OnePeerExponential(num_nodes), overlap=1)
    algorithm = Hierarchical(inner, ranks_per_node)
    results = run_ranks(num_ranks, train_rank, algorithm, SMOOTH, 1e-4)
    expected = run_ranks(num_nodes, train_nodes, inner, SMOOTH, ranks_per_node)
    for rank, (history, _) in enumerate(results):
        first = results[rank - rank % ranks_per_node][0]
        theirs, _ = expected[rank // ranks_per_node]
        for ours, same, other in zip(history, first, theirs, strict=True):
            assert torch.equal(ours, same)
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


def train_twice(rank, first, second):
    data = list(batches(rank, STEPS))
    return [train_wrapped(algorithm, data, **SMOOTH) for algorithm in (first, second)]


@pytest.mark.parametrize("overlap", [0, 1])
def test_one_node_is_all_reduce(overlap):
    algorithm = Hierarchical(SGP(Ring(1), overlap=overlap), 3)
    for ours, exact in run_ranks(3, train_twice, algorithm, AllReduce()):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inner", [SGP(Ring(3)), SGP(Star(3), overlap=2), DiLoCo(4)], ids=repr)
def test_one_rank_per_node_is_the_inner_algorithm_bit_for_bit(inner):
    for ours, theirs in run_ranks(3, train_twice, Hierarchical(inner, 1), inner):
        assert torch.equal(ours, theirs)


def count_bytes(rank, inner):
    model, optimizer, wrapped = start(Hierarchical(inner, 2))
    train(model, optimizer, list(batches(rank, STEPS)), forward=wrapped)
    return wrapped.bytes_sent, wrapped._buckets.num_bytes


@pytest.mark.parametrize("inner", [SGP(OnePeerExponential(2)), SGP(Ring(2), overlap=1)], ids=repr)
def test_bytes_sent_match_the_docstring(inner):
    gathers = STEPS - inner.overlap  # the last message is still in flight
    for sent, model_bytes in run_ranks(4, count_bytes, inner):
        mass = 8
        between = STEPS * (model_bytes // 2 + mass)
        within = gathers * (model_bytes // 2) + STEPS * model_bytes
        assert sent == between + within


def clip_and_accumulate(rank):
    """Train with two batches a step and clipping; return the gradient norms and parameters."""
    algorithm = Hierarchical(SGP(Ring(2), overlap=1), 2)
    model, optimizer, wrapped = start(algorithm, torch.optim.AdamW)
    norms, data = [], list(batches(rank, STEPS))
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        with wrapped.no_sync():
            nn.functional.mse_loss(wrapped(first[0]), first[1]).backward()
        nn.functional.mse_loss(wrapped(second[0]), second[1]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms, flat(model)


def test_clipping_sees_the_nodes_average_of_accumulated_gradients():
    results = run_ranks(4, clip_and_accumulate)
    for rank, (norms, parameters) in enumerate(results):
        assert norms == results[rank ^ 1][0]
        assert norms != results[rank ^ 2][0]
        assert torch.equal(parameters, results[rank ^ 1][1])


def train_with_scaler(rank):
    model, optimizer, wrapped = start(Hierarchical(SGP(Ring(2)), 2), momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, (inputs, targets) in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        spoil = math.inf if (rank, step) == (1, 3) else 1.0
        scaler.scale(nn.functional.mse_loss(wrapped(inputs * spoil), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
    return flat(model), scaler.get_scale()


def test_a_nodes_ranks_skip_the_same_step():
    results = run_ranks(4, train_with_scaler)
    assert [scale for _, scale in results] == [2.0**9, 2.0**9, 2.0**10, 2.0**10]
    for rank, (parameters, _) in enumerate(results):
        assert parameters.isfinite().all()
        assert torch.equal(parameters, results[rank ^ 1][0])


def interrupt(rank):
    """Raise inside the optimizer's step on all ranks, while parameters are the numerator."""
    model, optimizer, wrapped = start(Hierarchical(SGP(Star(3)), 2))
    data = list(batches(rank, 5))
    train(model, optimizer, data[:4], forward=wrapped)
    before, weight = flat(model), float(wrapped.push_sum_weight)

    def fail(*_):
        raise KeyError("a user's hook")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        train(model, optimizer, data[4:], forward=wrapped)
    hook.remove()
    wrapped.state_dict()
    torch.testing.assert_close(flat(model), before)
    train(model, optimizer, data[4:], forward=wrapped)
    return flat(model), weight


def test_an_interrupted_step_restores_debiased_parameters():
    results = run_ranks(6, interrupt)
    assert any(weight != 1 for _, weight in results)
    for rank, (parameters, _) in enumerate(results):
        assert torch.equal(parameters, results[rank ^ 1][0])


def train_in_join(rank, numbers):
    model, optimizer, wrapped = start(Hierarchical(SGP(Ring(2), overlap=1), 2))
    for _ in range(2):
        with wrapped.join():
            train(model, optimizer, list(batches(rank, numbers[rank])), forward=wrapped)
    train(model, optimizer, list(batches(rank, 1)), forward=wrapped)


def test_join_with_equal_numbers_of_batches_trains():
    run_ranks(4, train_in_join, [3, 3, 3, 3])


@pytest.mark.parametrize("numbers", [[3, 4, 4, 4], [4, 4, 3, 3], [5, 4, 3, 2], [0, 1, 1, 1]])
def test_join_with_unequal_numbers_is_one_error(numbers):
    outcomes = observe_ranks(4, train_in_join, numbers, time_limit=60, group_timeout=20)
    assert len({outcome.error for outcome in outcomes}) == 1
    without = sum(number == min(numbers) for number in numbers)
    assert outcomes[0].error.startswith(
        "ValueError: join() must be given equal numbers of batches on all ranks with Hierarchical, "
        f"got {without} without any while others still train"
    )


def resume(rank):
    algorithm = Hierarchical(NoLoCo(RandomMatching(2), 2), 2)
    data = list(batches(rank, 8))
    model, optimizer, wrapped = start(algorithm)
    train(model, optimizer, data[:5], forward=wrapped)
    state = wrapped._averager.state_dict()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    expected = train(model, optimizer, data[5:], forward=wrapped)
    wrapped.close()
    model, optimizer, wrapped = start(algorithm)
    wrapped._averager.load_state_dict(state)
    with torch.no_grad():
        for parameter, saved in zip(model.parameters(), parameters, strict=True):
            parameter.copy_(saved)
    return torch.equal(train(model, optimizer, data[5:], forward=wrapped), expected)


def test_a_run_resumes_bit_for_bit():
    assert run_ranks(4, resume) == [True] * 4


def train_in_subgroup(rank):
    group = dist.new_group([0, 1, 3, 4])
    if rank == 2:
        return None
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    algorithm = Hierarchical(SGP(Ring(2), overlap=1), 2)
    wrapped = GossipDataParallel(model, optimizer, algorithm, process_group=group)
    return train(model, optimizer, list(batches(rank, 4)), forward=wrapped)


def test_nodes_within_a_subgroup():
    results = run_ranks(5, train_in_subgroup)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[3], results[4])
    assert not torch.equal(results[0], results[3])


def step_in_no_sync(rank):
    model, optimizer, wrapped = start(Hierarchical(SGP(Ring(1)), 2))
    with wrapped.no_sync():
        train(model, optimizer, list(batches(rank, 1)), forward=wrapped)


MISTAKES = {
    "nodes that do not divide": (3, Hierarchical(SGP(Ring(1)), 2),
        "DisagreementError: rank 0: ranks_per_node must divide the process group's 3 ranks, got 2"),
    "a topology for ranks": (4, Hierarchical(SGP(Ring(4)), 2),
        "DisagreementError: rank 0: inner must be for 2 nodes as its ranks: topology must be"),
    "all-reduce": (2, Hierarchical(AllReduce(), 2),
        "ValueError: inner must be a gossip algorithm, got AllReduce("),
    "all-reduce, one rank per node": (2, Hierarchical(AllReduce(), 1),
        "ValueError: inner must be a gossip algorithm, got AllReduce("),
    "leaders": (4, Hierarchical(LeaderSGD(1), 2),
        "ValueError: inner must be a gossip algorithm, got LeaderSGD("),
    "inside slowmo": (4, SlowMo(Hierarchical(SGP(Ring(2)), 2), 3),
        "ValueError: inner must be a gossip algorithm, got Hierarchical("),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_error_on_every_rank(name):
    num_ranks, algorithm, sentence = MISTAKES[name]
    outcomes = observe_ranks(num_ranks, train_rank, algorithm, {}, time_limit=60, group_timeout=20)
    assert len({outcome.error for outcome in outcomes}) == 1
    assert outcomes[0].error.startswith(sentence)


def test_a_step_inside_no_sync_is_an_error():
    outcomes = observe_ranks(2, step_in_no_sync, time_limit=60, group_timeout=20)
    sentence = "optimizer.step() must be called outside of no_sync() with Hierarchical"
    assert all(sentence in outcome.error for outcome in outcomes)


@pytest.mark.parametrize("number", [0, 1.5, "2"])
def test_an_invalid_ranks_per_node_is_an_error(number):
    with pytest.raises(ValueError, match="ranks_per_node must be a positive number of ranks, got"):
        Hierarchical(SGP(Complete(2)), number)


def test_a_model_too_small_to_shard_is_an_error():
    algorithm = Hierarchical(SGP(Ring(1)), 17)
    buckets = FlatBuckets([nn.Parameter(torch.zeros(1))], 2**20)
    with pytest.raises(ValueError, match="ranks_per_node must leave each rank a shard of the"):
        algorithm.start(nn.Module(), None, buckets, None)
