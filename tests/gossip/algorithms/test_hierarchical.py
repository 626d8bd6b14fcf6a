"""Hierarchical: a node gossips like one rank that trains on all the node's batches."""

import math

import pytest
import torch
from torch import nn

from pyparallel.comm import Run
from pyparallel.gossip import SGP, AllReduce, Hierarchical, NoLoCo, SlowMo
from pyparallel.gossip.algorithms.hierarchical import hierarchical
from pyparallel.gossip.topology import OnePeerExponential, RandomMatching, Ring, Star
from pyparallel.training import FlatBuckets
from tests.gossip.loops import (
    SMOOTH,
    batches,
    build_model,
    error_of,
    flat,
    start,
    train,
    train_wrapped,
)
from tests.workers import on_ranks

STEPS = 10


def train_on(data, algorithm, **options):
    """Return the parameters after every step, flushed and averaged, and the push-sum weight."""
    model, optimizer, wrapped = start(algorithm, **options)
    history = [train(model, optimizer, [each], wrapped) for each in data]
    weight = float(wrapped.push_sum_weight)
    with wrapped.consensus() as averaged:
        mean = flat(averaged)
    wrapped.flush()
    return [*history, flat(model), mean], weight


def train_ranks(rank, cases, ranks_per_node, options):
    return [
        train_on(batches(rank, STEPS), Hierarchical(inner, ranks_per_node), **options)
        for inner in cases
    ]


def train_nodes(rank, cases, ranks_per_node, options):
    """Train the same with one rank for each node."""
    parts = [batches(rank * ranks_per_node + local, STEPS) for local in range(ranks_per_node)]
    data = [tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(*parts, strict=True)]
    return [train_on(data, inner, **options) for inner in cases]


def check_nodes(ranks, num_nodes, cases, ranks_per_node, options):
    """Compare nodes, in small buckets, with single ranks, in one bucket."""
    num_ranks = num_nodes * ranks_per_node
    results = ranks.run(num_ranks, train_ranks, cases, ranks_per_node, {**options, "cap": 1e-4})
    expected = ranks.run(num_nodes, train_nodes, cases, ranks_per_node, options)
    for rank, of_rank in enumerate(results):
        first, node = rank - rank % ranks_per_node, rank // ranks_per_node
        for index, (history, weight) in enumerate(of_rank):
            theirs, its_weight = expected[node][index]
            assert weight == its_weight, cases[index]
            same = results[first][index][0]
            for ours, neighbors, other in zip(history, same, theirs, strict=True):
                assert torch.equal(ours, neighbors), cases[index]
                torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


def test_nodes_train_like_single_ranks_with_all_their_batches(ranks):
    inner = [
        SGP(OnePeerExponential(2)),
        SGP(Star(2), overlap=3),
        SlowMo(SGP(Ring(2), overlap=1), 3),
        NoLoCo(RandomMatching(2), 4),
    ]
    check_nodes(ranks, 2, inner, 2, SMOOTH)


def train_node(rank, topology):
    """Return the parameters after each step of plain SGD."""
    model, optimizer, wrapped = start(Hierarchical(SGP(topology), 2))
    return [train(model, optimizer, [each], wrapped) for each in batches(rank, 6)]


def test_nodes_take_steps_of_sgp_with_their_mean_gradients(ranks):
    topology, model = Star(3), build_model()
    x, w = flat(model).repeat(3, 1).double(), torch.ones(3, 1).double()
    results = ranks.run(6, train_node, topology)
    data = [list(batches(rank, 6)) for rank in range(6)]
    for step in range(6):

        def gradient(z, step=step):
            rows = []
            for rank, row in enumerate(z.float()):
                model.zero_grad()
                nn.utils.vector_to_parameters(row.clone(), model.parameters())
                inputs, targets = data[rank][step]
                nn.functional.mse_loss(model(inputs), targets).backward()
                rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            return 0.05 * torch.stack(rows).double()

        x, w = hierarchical(x, w, gradient, torch.from_numpy(topology.mixing_matrix(step)), 2)
        for rank, history in enumerate(results):
            expected = (x / w)[rank // 2].float()
            torch.testing.assert_close(history[step], expected, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 3), (3, 2), (2, 4)], ids=str)
def test_nodes_of_other_sizes(ranks, num_nodes, ranks_per_node):
    inner = [SGP(OnePeerExponential(num_nodes), overlap=1)]
    check_nodes(ranks, num_nodes, inner, ranks_per_node, SMOOTH)


def train_each(rank, algorithms):
    data = list(batches(rank, STEPS))
    return [train_wrapped(algorithm, data, **SMOOTH) for algorithm in algorithms]


def test_one_node_is_all_reduce_and_one_rank_per_node_the_inner_algorithm(ranks):
    star = SGP(Star(3), overlap=2)
    one_node = Hierarchical(SGP(Ring(1), overlap=1), 3)
    algorithms = [one_node, AllReduce(), Hierarchical(star, 1), star]
    for ours, exact, single, inner in ranks.run(3, train_each, algorithms):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
        assert torch.equal(single, inner)


def count_bytes(rank, inner):
    model, optimizer, wrapped = start(Hierarchical(inner, 2))
    train(model, optimizer, list(batches(rank, STEPS)), forward=wrapped)
    return wrapped.bytes_sent, wrapped._buckets.num_bytes


def test_bytes_sent_match_the_docstring(ranks):
    cases = SGP(OnePeerExponential(2)), SGP(Ring(2), overlap=1)
    results = ranks.run_each(4, count_bytes, [(inner,) for inner in cases])
    for inner, found in zip(cases, results, strict=True):
        for sent, model_bytes in found:
            gathers = STEPS - inner.overlap  # the last message is still in flight
            between = STEPS * (model_bytes // 2 + 64)  # a header goes beside it
            within = gathers * (model_bytes // 2) + STEPS * model_bytes
            assert sent == between + within, inner


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


def test_clipping_sees_the_nodes_average_of_accumulated_gradients(ranks):
    results = ranks.run(4, clip_and_accumulate)
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


def test_a_nodes_ranks_skip_the_same_step(ranks):
    results = ranks.run(4, train_with_scaler)
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


def test_an_interrupted_step_restores_debiased_parameters(ranks):
    results = ranks.run(6, interrupt)
    assert any(weight != 1 for _, weight in results)
    for rank, (parameters, _) in enumerate(results):
        assert torch.equal(parameters, results[rank ^ 1][0])


def train_in_join(rank, numbers):
    model, optimizer, wrapped = start(Hierarchical(SGP(Ring(2), overlap=1), 2))
    for _ in range(2):
        with wrapped.join():
            train(model, optimizer, list(batches(rank, numbers[rank])), forward=wrapped)
    train(model, optimizer, list(batches(rank, 1)), forward=wrapped)


def step_in_no_sync(rank):
    model, optimizer, wrapped = start(Hierarchical(SGP(Ring(2)), 2))
    with wrapped.no_sync():
        train(model, optimizer, list(batches(rank, 1)), forward=wrapped)


@on_ranks(4)
def test_unequal_numbers_of_batches_or_of_averages_are_one_error(rank):
    no_sync = error_of(step_in_no_sync, rank)
    assert "optimizer.step() must be called outside of no_sync() with Hierarchical" in no_sync
    train_in_join(rank, [3, 3, 3, 3])
    for number, numbers in (2, [4, 4, 3, 3]), (1, [0, 1, 1, 1]):
        assert error_of(train_in_join, rank, numbers).startswith(
            "ValueError: join() must be given equal numbers of batches on all ranks with "
            f"Hierarchical, got {number} without any while others still train"
        )


def test_a_model_too_small_to_shard_is_an_error():
    algorithm = Hierarchical(SGP(Ring(1)), 17)
    buckets = FlatBuckets([nn.Parameter(torch.zeros(1))], 2**20)
    with pytest.raises(ValueError, match="ranks_per_node must leave each rank a shard of the"):
        algorithm.start(nn.Module(), None, buckets, Run())
