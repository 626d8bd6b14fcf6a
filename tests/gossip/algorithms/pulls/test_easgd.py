"""EASGD and EAMSGD: the rules of the paper, for all ranks in one process in float64."""

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel.comm import Run
from pyparallel.gossip import EASGD
from pyparallel.gossip.algorithms.pulls.easgd import easgd
from pyparallel.training import FlatBuckets
from tests.gossip.loops import SMOOTH, batches, build_model, flat, start, take_step, train

RATE, DELTA, BETA, INTERVAL, STEPS = 0.1, 0.8, 0.7, 3, 20
CURVATURES = torch.rand(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.2
CENTERS = torch.randn(4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def gradient_of(x, rows=slice(None)):
    """Return that of each rank's f(x) = 1/2 sum curvature (x - center)^2, (n, 5)."""
    return CURVATURES[rows] * (x - CENTERS[rows])


def train_by_the_rule(delta):
    """Return x + delta v of all ranks and the center, (steps, 5, 5), of the paper's Algorithm 2.

    v <- delta v - rate * gradient(x + delta v), and x <- x + v; before, if the interval divides the
    step, x <- x - alpha (x - center), and the center moves by as much of all ranks.
    """
    alpha = BETA / 4
    x, v, center = torch.zeros(4, 5).double(), torch.zeros(4, 5).double(), torch.zeros(5).double()
    history = []
    for t in range(STEPS):
        gradient = gradient_of(x + delta * v)
        if t % INTERVAL == 0:
            pull = alpha * (x - center)
            x, center = x - pull, center + pull.sum(0)
        v = delta * v - RATE * gradient
        x = x + v
        history.append(torch.cat([x + delta * v, center[None]]))
    return torch.stack(history)


def train_quadratic(rank, delta):
    """Step the averager as a trainer does; return parameters and center after each step."""
    parameters = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 3)]
    buckets = FlatBuckets(parameters, 2**20)
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=delta, nesterov=delta > 0)
    algorithm = EASGD(INTERVAL, BETA)
    averager = algorithm.start(nn.ParameterList(parameters), optimizer, buckets, Run())
    history = []
    for _ in range(STEPS):
        x = torch.cat(parameters).detach()
        for parameter, grad in zip(parameters, gradient_of(x, rank).split([2, 3]), strict=True):
            parameter.grad = grad.clone()
        history.append(torch.cat([each.flatten() for each in buckets.views(averager._center)]))
        take_step(averager, optimizer)
        history[-1] = torch.stack([torch.cat(parameters).detach(), history[-1]])
    return torch.stack(history)


def train_in_two_ways(rank):
    return [train_quadratic(rank, delta) for delta in (0.0, DELTA)]


def test_ranks_and_center_move_by_the_rules_of_the_paper_with_momentum_and_without(ranks):
    results = ranks.run(4, train_in_two_ways)
    for way, delta in enumerate((0.0, DELTA)):
        expected = train_by_the_rule(delta)
        assert (expected[-1] - train_by_the_rule(0.3)[-1]).abs().max() > 1e-2
        for rank, found in enumerate(ways[way] for ways in results):
            close = {"rtol": 0, "atol": 1e-12}
            torch.testing.assert_close(found[:, 0], expected[:, rank], **close)
            # The center of step t has moved by the places before the step, as in the paper.
            torch.testing.assert_close(found[1:, 1], expected[1:, 4], **close)


def test_the_function_is_the_rule():
    x, center = torch.randn(4, 5).double(), torch.randn(5).double()
    new, moved = easgd(x, center, RATE * gradient_of(x), BETA / 4)
    torch.testing.assert_close(moved, (1 - BETA) * center + BETA * x.mean(0))
    torch.testing.assert_close(new, x - RATE * gradient_of(x) - BETA / 4 * (x - center))


def train_and_evaluate(rank):
    """Return parameters and center with torch's SGD and pyparallel's, and after a resume."""
    data = list(batches(rank, 12))
    found = []
    for make in (torch.optim.SGD, pyparallel.optim.SGD):
        model, optimizer, wrapped = start(EASGD(2, 0.5), make, **SMOOTH)
        train(model, optimizer, data[:7], wrapped)
        state = wrapped.algorithm_state_dict()
        saved = {key: each.clone() for key, each in wrapped.state_dict().items()}
        algorithm = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, {**state})
        momenta = optimizer.state_dict()
        momenta = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, momenta)
        train(model, optimizer, data[7:], wrapped)
        after = flat(model)
        with wrapped.consensus():
            center = flat(model)
        optimizer.load_state_dict(momenta)
        wrapped.load_state_dict(saved)
        wrapped.load_algorithm_state_dict(algorithm)
        train(model, optimizer, data[7:], wrapped)
        found.append((after, center, flat(model)))
    return found


def test_every_optimizer_is_pulled_and_a_run_resumes_bit_for_bit(ranks):
    results = ranks.run(2, train_and_evaluate)
    for way in range(2):
        (first, center, again), (other, same, _) = (each[way] for each in results)
        assert torch.equal(first, again)
        assert torch.equal(center, same)
        assert (first - center).norm() > 1e-3 < (other - center).norm()
        torch.testing.assert_close(first, results[0][0][0], rtol=1e-5, atol=2e-6)


def train_alone_to_the_end(rank):
    """Rank 1 has no batches: it is pulled, and pulls the center."""
    model, optimizer, wrapped = start(EASGD(1, 0.6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(rank))
    before = flat(model)
    with wrapped.join():
        if rank == 0:
            train(model, optimizer, batches(0, 2), wrapped)
    with wrapped.consensus():
        return before, flat(build_model()), flat(model)


def test_a_rank_without_batches_pulls_the_center(ranks):
    for before, begin, center in ranks.run(2, train_alone_to_the_end):
        assert (center - begin).abs().max() > 0.1
        assert before.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "interval must be a positive number of steps, got 0"),
        ((1, 0.0), r"beta must be in \(0, 1\], got 0.0"),
        ((1, 1.5), r"beta must be in \(0, 1\], got 1.5"),
    ],
)
def test_options_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        EASGD(*arguments)
