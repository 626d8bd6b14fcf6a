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
from pyparallel.gossip.algorithms.pulls.leader import find_leader
from pyparallel.gossip.algorithms.pulls.leader_sgd import leader_sgd, pulled
from pyparallel.training import FlatBuckets
from tests.cases import slow
from tests.gossip.loops import SMOOTH, batches, error_of, flat, start, take_step, train_alone
from tests.workers import on_ranks

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


# f_r(x) = 1/2 (x - center_r)' H (x - center_r) of two parameters of 2 and 3 elements; the first has
# learning rate 0.1 and the second 0.04, which a schedule multiplies by 0.9 after every step.
CURVATURE = numpy.array([1.0, 0.5, 2.0, 0.3, 1.2])
CENTERS = numpy.random.default_rng(5).normal(size=(4, 5))
STARTS = numpy.random.default_rng(6).normal(size=(4, 5))
RATES = numpy.array([0.1, 0.1, 0.04, 0.04, 0.04])
MOMENTUM, DECAY = 0.8, 0.05


def train_by_the_rule(losses, ranks_per_node, interval, global_interval, form):
    """Return x of all ranks, (steps, 4, 5), by ``leader_sgd`` or, with pulls, by ``pulled``.

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
        if "local_strength" in form:
            x = leader_sgd(x, rate * u, rate, overall + local)
        else:
            x = pulled(x - rate * u, overall + local)
        if (k + 1) % interval == 0:
            means = losses[k + 1 - interval : k + 1].mean(axis=0)
            if ranks_per_node > 1:
                firsts = range(0, 4, ranks_per_node)
                chosen = [
                    first + means[first : first + ranks_per_node].argmin() for first in firsts
                ]
                leaders = x[numpy.repeat(chosen, ranks_per_node)]
                local = [(leaders, form.get("local_strength") or form["local_drift"] / interval)]
                x = pulled(x, [(leaders, form.get("local_pull", 0.0))])
            if (k + 1) % global_interval == 0 and ranks_per_node < 4:
                leader = x[means.argmin()]
                strength = form.get("global_strength") or form["global_drift"] / global_interval
                overall = [(leader, strength)]
                x = pulled(x, [(leader, form.get("global_pull", 0.0))])
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


@pytest.mark.parametrize(
    ("ranks_per_node", "form"),
    [(2, STRENGTHS), (2, PULLS), (1, PULLS), slow(4, PULLS)],
    ids=["paper", "code", "code, no nodes", "code, one node"],
)
def test_leaders_pull_by_the_rules_of_the_paper_and_of_the_authors_code(
    ranks, ranks_per_node, form
):
    losses = numpy.random.default_rng(7).random((17, 4))
    algorithm = LeaderSGD(ranks_per_node, 2, 4, **form)
    expected = train_by_the_rule(losses, ranks_per_node, 2, 4, form)
    freely = train_by_the_rule(losses, ranks_per_node, 2, 4, NO_PULL)
    assert numpy.abs(expected - freely).max() > 1e-2
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


@on_ranks(4)
def test_bytes_sent_match_the_docstring(rank):
    model, optimizer, wrapped = start(LeaderSGD(2, 2, 4))
    train(model, optimizer, batches(rank, 8), wrapped)
    size = wrapped._buckets.num_bytes
    assert wrapped.bytes_sent == 4 * (size // 2) + 2 * (size * 3 // 4) + 4 * 3 * (16 + 64)


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


@on_ranks(3)
def test_without_nodes_one_finite_loss_is_enough(rank):
    model, _, wrapped = start(LeaderSGD(1, 1, 1, global_pull=1.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    wrapped.record_loss([NAN, 2.0, 1.0][rank])
    wrapped._rounds.joined.shadow_round()
    assert flat(model).eq(2).all()


def test_a_form_has_the_same_name_in_saved_runs_as_before_there_were_two():
    assert repr(LeaderSGD(2, local_pull=0.3)) == (
        "LeaderSGD(ranks_per_node=2, interval=4, global_interval=16, local_pull=0.3, "
        "global_pull=0.1, local_drift=0.1, global_drift=0.1)"
    )
    assert repr(LeaderSGD(2)) == (
        "LeaderSGD(ranks_per_node=2, interval=4, global_interval=16, local_strength=0.1, "
        "global_strength=0.1)"
    )
