"""LeaderSGD: all ranks choose the same leaders; the rules of the paper and the authors' code."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pyparallel
from pyparallel.comm import Run
from pyparallel.gossip import LeaderSGD
from pyparallel.gossip.algorithms.leader import find_leader
from pyparallel.gossip.algorithms.leader_sgd import leader_sgd, pulled
from pyparallel.training import FlatBuckets
from tests.cases import slow
from tests.gossip.loops import (
    SMOOTH,
    batches,
    build_model,
    error_of,
    flat,
    start,
    take_step,
    train_alone,
)

NO_PULL = {"local_pull": 0.0, "global_pull": 0.0, "local_drift": 0.0, "global_drift": 0.0}
PULLS = {"local_pull": 0.3, "global_pull": 0.2, "local_drift": 0.4, "global_drift": 0.1}
STRENGTHS = {"local_strength": 1.5, "global_strength": 0.8}
FORMS = [PULLS, STRENGTHS]
NAN = math.nan


def train(model, optimizer, data, wrapped, recorded=None):
    """Return the parameters after each step; ``recorded`` replaces the losses to record."""
    history = []
    for step, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        loss.backward()
        wrapped.record_loss(loss if recorded is None else recorded[step])
        optimizer.step()
        history.append(flat(model))
    return history


def start_and_train(algorithm, data, recorded=None, **options):
    model, optimizer, wrapped = start(algorithm, **options)
    return train(model, optimizer, data, wrapped, recorded)


# ----------------------------------------------------------------------------- choice of a leader


def test_the_lowest_loss_leads_and_of_equals_the_lowest_rank():
    assert find_leader([3.0, 1.0, 2.0], range(3)) == 1
    assert find_leader([1.0, 2.0, 1.0, 0.0], range(3)) == 0
    assert find_leader([5.0, 1.0, 4.0, 4.0], range(2, 4)) == 2


@given(st.lists(st.floats(), min_size=1, max_size=9))
def test_a_leader_has_the_lowest_finite_loss(losses):
    leader = find_leader(losses, range(len(losses)))
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert (leader is None) == (not finite)
    if finite:
        assert losses[leader] == min(finite)
        assert all(loss != losses[leader] for loss in losses[:leader])


# -------------------------------------------------------------------------------- the update rule


def simulate(algorithm, num_ranks, num_steps, recorded):
    """Train all ranks in turn, in float64, by the rule of the authors' code."""
    models = [build_model().double() for _ in range(num_ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    data = [list(batches(rank, num_steps)) for rank in range(num_ranks)]
    nodes = [range(i, i + algorithm.ranks_per_node)
             for i in range(0, num_ranks, algorithm.ranks_per_node)]  # fmt: skip
    local, overall, window = {}, None, []
    history = []

    def move(rank, target, fraction):
        vector = pulled(flat(models[rank]), [(target, fraction)])
        nn.utils.vector_to_parameters(vector, models[rank].parameters())

    for step in range(1, num_steps + 1):
        window.append(recorded[step - 1])
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, targets = data[rank][step - 1]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs.double()), targets.double()).backward()
            optimizer.step()
            if overall is not None:
                move(rank, overall, algorithm.global_drift / algorithm.global_interval)
            if rank in local:
                move(rank, local[rank], algorithm.local_drift / algorithm.interval)
        if step % algorithm.interval == 0:
            losses = [sum(column) / len(window) for column in zip(*window, strict=True)]
            window = []
            if algorithm.ranks_per_node > 1:
                for node in nodes:
                    leader = min(node, key=lambda rank: (losses[rank], rank))
                    parameters = flat(models[leader])
                    for rank in node:
                        local[rank] = parameters
                        move(rank, parameters, algorithm.local_pull)
            if step % algorithm.global_interval == 0 and len(nodes) > 1:
                leader = min(range(num_ranks), key=lambda rank: (losses[rank], rank))
                overall = flat(models[leader])
                for rank in range(num_ranks):
                    move(rank, overall, algorithm.global_pull)
        history.append([flat(model) for model in models])
    return history


def train_with_losses(rank, algorithm, recorded):
    mine = [losses[rank] for losses in recorded]
    return start_and_train(algorithm, batches(rank, len(recorded)), mine, momentum=0.9)


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"), [(4, 2), (4, 1), slow(4, 4), slow(6, 2)], ids=str
)
def test_pulls_follow_the_rule_of_the_authors_code(ranks, num_ranks, ranks_per_node):
    algorithm = LeaderSGD(ranks_per_node, interval=2, global_interval=4, **PULLS)
    generator = torch.Generator().manual_seed(3)
    recorded = torch.rand(13, num_ranks, generator=generator, dtype=torch.float64).tolist()
    expected = simulate(algorithm, num_ranks, 13, recorded)
    for rank, history in enumerate(ranks.run(num_ranks, train_with_losses, algorithm, recorded)):
        for step, parameters in enumerate(history):
            theirs = expected[step][rank].float()
            torch.testing.assert_close(parameters, theirs, rtol=1e-5, atol=2e-6)


# f_r(x) = 1/2 (x - center_r)' H (x - center_r) of two parameters of 2 and 3 elements; the first has
# learning rate 0.1 and the second 0.04, which a schedule multiplies by 0.9 after every step.
CURVATURE = numpy.array([1.0, 0.5, 2.0, 0.3, 1.2])
CENTERS = numpy.random.default_rng(5).normal(size=(4, 5))
STARTS = numpy.random.default_rng(6).normal(size=(4, 5))
RATES = numpy.array([0.1, 0.1, 0.04, 0.04, 0.04])
MOMENTUM, DECAY = 0.8, 0.05


def lsgd_of_the_paper(losses, interval, global_interval, strength, global_strength):
    """Return x of all ranks, (steps, 4, 5), by ``leader_sgd``, two nodes of two workers.

    The update is SGD's with momentum, u <- m u + g, and g includes L2 decay. Leaders have the
    lowest mean loss since the last choice.
    """
    x, u, rates = torch.tensor(STARTS), torch.zeros(4, 5), torch.tensor(RATES)
    curvature, centers = torch.tensor(CURVATURE), torch.tensor(CENTERS)
    local, overall = [], []
    history = []
    for k in range(len(losses)):
        rate = rates * 0.9**k
        u = MOMENTUM * u + curvature * (x - centers) + DECAY * x
        x = leader_sgd(x, rate * u, rate, overall + local)
        if (k + 1) % interval == 0:
            means = losses[k + 1 - interval : k + 1].mean(axis=0)
            first, second = means[:2].argmin(), 2 + means[2:].argmin()
            local = [(x[[first, first, second, second]], strength)]
            if (k + 1) % global_interval == 0:
                overall = [(x[means.argmin()], global_strength)]
        history.append(x.numpy())
    return numpy.array(history)


def train_quadratic(rank, algorithm, losses):
    """Step the averager as a trainer does, on float64 parameters; return x after each step."""
    x = torch.tensor(STARTS[rank])
    parameters = [torch.nn.Parameter(x[:2].clone()), torch.nn.Parameter(x[2:].clone())]
    buckets = FlatBuckets(parameters, 2**20)
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.04}]
    optimizer = torch.optim.SGD(groups, momentum=MOMENTUM, weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    averager = algorithm.start(nn.ParameterList(parameters), optimizer, buckets, Run())
    history = []
    for step_losses in losses:
        gradient = torch.tensor(CURVATURE) * (torch.cat(parameters).detach() - CENTERS[rank])
        parameters[0].grad, parameters[1].grad = gradient[:2].clone(), gradient[2:].clone()
        for read in averager.run.read_loss:
            read(float(step_losses[rank]))
        take_step(averager, optimizer)
        scheduler.step()
        history.append(torch.cat(parameters).detach().numpy().copy())
    return history


def test_strengths_follow_the_papers_rule(ranks):
    losses = numpy.random.default_rng(7).random((17, 4))
    algorithm = LeaderSGD(2, 2, 4, **STRENGTHS)
    expected = lsgd_of_the_paper(losses, 2, 4, 1.5, 0.8)
    assert numpy.abs(expected - lsgd_of_the_paper(losses, 2, 4, 1.5, 0.7)).max() > 1e-3
    for rank, history in enumerate(ranks.run(4, train_quadratic, algorithm, losses)):
        numpy.testing.assert_allclose(history, expected[:, rank], rtol=0, atol=1e-12)


def train_in_each_way(rank, algorithm, recorded):
    """Return the parameters with torch's SGD, pyparallel's, a tensor lr, and a closure."""
    data = list(batches(rank, len(recorded)))
    mine = [losses[rank] for losses in recorded]
    ways = [
        start_and_train(algorithm, data, mine, make_optimizer=make, lr=lr, **SMOOTH)[-1]
        for make, lr in [
            (torch.optim.SGD, 0.05),
            (pyparallel.optim.SGD, 0.05),
            (torch.optim.SGD, torch.tensor(0.05)),
        ]
    ]
    model, optimizer, wrapped = start(algorithm, **SMOOTH)
    for step, (inputs, targets) in enumerate(data):

        def closure(step=step, inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(inputs), targets)
            loss.backward()
            wrapped.record_loss(mine[step])
            return loss

        optimizer.step(closure)
    return [*ways, flat(model)]


def test_every_optimizer_is_pulled_alike(ranks):
    recorded = torch.rand(11, 4, generator=torch.Generator().manual_seed(3)).tolist()
    algorithm = LeaderSGD(2, 2, 4, **STRENGTHS)
    for alone, (expected, *ways) in zip(
        (train_alone(batches(rank, 11), **SMOOTH) for rank in range(4)),
        ranks.run(4, train_in_each_way, algorithm, recorded),
        strict=True,
    ):
        assert (expected - alone).abs().max() > 1e-3
        for parameters in ways:
            torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=2e-6)


def pull_with_lbfgs(rank):
    """Return how far LBFGS, whose gradients are all 0, is pulled in a step, and the distance."""
    model, optimizer, wrapped = start(LeaderSGD(1, 1, 1, global_strength=2.0), torch.optim.LBFGS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))

    def closure():
        optimizer.zero_grad()
        loss = 0 * wrapped(torch.ones(1, 6)).sum()
        loss.backward()
        wrapped.record_loss(1.0 - rank)
        return loss

    optimizer.step(closure)
    before = flat(model)
    with wrapped.no_sync():
        optimizer.step(closure)
    return before, flat(model)


def test_a_closure_is_pulled_once_from_where_the_step_began(ranks):
    (before, after), (leader, still) = ranks.run(2, pull_with_lbfgs)
    torch.testing.assert_close(after, before + 0.05 * 2.0 * (1 - before))
    assert torch.equal(leader, still)


def train_own(rank, algorithm, num_steps, options):
    return start_and_train(algorithm, batches(rank, num_steps), **options)[-1]


def test_without_pulls_every_rank_trains_alone_bit_for_bit(ranks):
    for form in (NO_PULL, {"local_strength": 0.0, "global_strength": 0.0}):
        algorithm = LeaderSGD(2, interval=1, global_interval=2, **form)
        for rank, parameters in enumerate(ranks.run(4, train_own, algorithm, 9, SMOOTH)):
            assert torch.equal(parameters, train_alone(list(batches(rank, 9)), **SMOOTH))


def compare_once(rank, algorithm, losses):
    """Return parameters before and after a comparison; ranks start apart and do not train."""
    model, optimizer, wrapped = start(algorithm, lr=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    before = flat(model)
    wrapped.record_loss(losses[rank])
    optimizer.step()
    return before, flat(model)


COMPARISONS = [  # losses of four ranks, and their leaders
    ([4.0, 3.0, 2.0, 1.0], [1, 3], 3),
    ([1.0, 1.0, 1.0, 1.0], [0, 2], 0),
    ([NAN, 3.0, 2.0, NAN], [1, 2], 2),
    ([NAN, 3.0, math.inf, 5.0], [1, 3], 1),
]


def test_all_ranks_follow_the_same_leaders_which_do_not_move(ranks):
    algorithm = LeaderSGD(2, interval=1, global_interval=1, local_pull=0.5, global_pull=0.25)
    found = ranks.run_each(4, compare_once, [(algorithm, losses) for losses, _, _ in COMPARISONS])
    for (losses, local_leaders, leader), results in zip(COMPARISONS, found, strict=True):
        before = [first for first, _ in results]
        for rank, (mine, after) in enumerate(results):
            expected = mine + 0.5 * (before[local_leaders[rank // 2]] - mine)
            expected = expected + 0.25 * (before[leader] - expected)
            torch.testing.assert_close(after, expected)
        assert torch.equal(results[leader][1], before[leader]), losses


# ------------------------------------------------------------------------------ losses and errors


def count_bytes(rank):
    model, optimizer, wrapped = start(LeaderSGD(2, 2, 4))
    train(model, optimizer, batches(rank, 8), wrapped)
    return wrapped.bytes_sent, wrapped._buckets.num_bytes


def test_bytes_sent_match_the_docstring(ranks):
    for sent, model_bytes in ranks.run(4, count_bytes):
        assert sent == 4 * (model_bytes // 2) + 2 * (model_bytes * 3 // 4) + 4 * 3 * (16 + 64)


def skip_losses(rank, missing, form):
    _, optimizer, wrapped = start(LeaderSGD(2, interval=3, global_interval=3, **form))
    for inputs, targets in batches(rank, 3):
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        loss.backward()
        if rank not in missing:
            wrapped.record_loss(loss)
        optimizer.step()


def refuse_losses(rank):
    _, _, wrapped = start(LeaderSGD(2))
    with pytest.raises(ValueError, match=r"loss must be one number, got a tensor of shape \[3\]"):
        wrapped.record_loss(torch.zeros(3))
    cases = [
        (skip_losses, [2], PULLS),
        (skip_losses, [0, 1, 3], STRENGTHS),  # only one rank records losses
        (skip_losses, range(4), STRENGTHS),
        (compare_once, LeaderSGD(2, 1, 1), [NAN] * 4),
        (compare_once, LeaderSGD(2, 1, 1), [1.0, 2.0, math.inf, NAN]),
    ]
    return [error_of(function, rank, *arguments) for function, *arguments in cases]


def test_losses_that_are_missing_or_not_finite_are_one_error_on_every_rank(ranks):
    errors, *others = ranks.run(4, refuse_losses)
    assert others == [errors] * 3
    missing = (
        "ValueError: record_loss(loss) must be called in every step before optimizer.step(), as "
        "LeaderSGD compares losses, got none from {} in the steps up to 3"
    )
    not_finite = (
        "ValueError: losses must be finite on at least one rank of each node, got {} in the steps "
        "up to 1"
    )
    assert errors == [
        missing.format("rank 2"),
        missing.format("ranks 0, 1, 3"),
        missing.format("ranks 0, 1, 2, 3"),
        not_finite.format("nan, nan from ranks 0, 1"),
        not_finite.format("inf, nan from ranks 2, 3"),
    ]


def train_unequally(rank, form):
    """Train with unequal numbers of batches: rank 1 runs out first, then the first node."""
    model, optimizer, wrapped = start(LeaderSGD(2, 2, 4, **form))
    with wrapped.join():
        history = train(model, optimizer, batches(rank, [9, 4, 17, 16][rank]), wrapped)
    return history[-1], flat(model)


def test_ranks_without_batches_move_only_at_the_authors_comparisons(ranks):
    for form in FORMS:
        results = ranks.run(4, train_unequally, form)
        assert all(after.isfinite().all() for _, after in results)
        own, after = results[1]
        assert torch.equal(own, after) == (form is STRENGTHS)


def lose_one_loss(rank):
    model, _, wrapped = start(LeaderSGD(1, 1, 1, global_pull=1.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    wrapped.record_loss([NAN, 2.0, 1.0][rank])
    wrapped._rounds.joined.shadow_round()
    return flat(model)


def test_without_nodes_one_finite_loss_is_enough(ranks):
    for parameters in ranks.run(3, lose_one_loss):
        assert torch.equal(parameters, torch.full_like(parameters, 2.0))


def test_a_form_has_the_same_name_in_saved_runs_as_before_there_were_two():
    assert repr(LeaderSGD(2, local_pull=0.3)) == (
        "LeaderSGD(ranks_per_node=2, interval=4, global_interval=16, local_pull=0.3, "
        "global_pull=0.1, local_drift=0.1, global_drift=0.1)"
    )
    assert repr(LeaderSGD(2)) == (
        "LeaderSGD(ranks_per_node=2, interval=4, global_interval=16, local_strength=0.1, "
        "global_strength=0.1)"
    )
