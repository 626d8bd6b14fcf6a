"""Losses: the papers' rules in plain loops, the trainers' own runs on gloo, and known minima."""

import numpy as np
import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import (
    ADPSGD,
    DPSGD,
    OSGP,
    SGP,
    AllReduce,
    DiLoCo,
    Hierarchical,
    LocalSGD,
    NoLoCo,
    SlowMo,
    StreamingDiLoCo,
)
from pyparallel.gossip.topology import (
    Complete,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
)
from pyparallel.planning.simulate import (
    Links,
    LogisticRegression,
    Profile,
    Quadratic,
    Stragglers,
    simulate_run,
)
from tests.planning.simulate import papers

LINKS, PROFILE = Links.uniform(1e9), Profile(0.1)
LR, D, STEPS, SEED = 0.2, 7, 23, 3
OBJECTIVES = [
    Quadratic(LR, D, 0.8, noise=0.3),
    LogisticRegression(LR, D, 0.8, batch=5, samples=9),
]


def simulate(algorithm, n, objective, steps=STEPS, **options):
    return simulate_run(
        algorithm, n, LINKS, PROFILE, 1e6,
        num_steps=steps, seed=SEED, objective=objective, **options,
    )  # fmt: skip


def gradient_of(objective, shards):
    """The gradient of a rank, sample after sample."""

    def of_quadratic(i, z, step):
        return shards.curvatures[i] * (z - shards.minima[i]) + shards.draw(step)[i]

    def of_samples(i, z, step):
        rows = [shards.signed[i, each] for each in shards.draw(step)[i]]
        slopes = [-u / (1 + np.exp(u @ z)) for u in rows]
        return sum(slopes) / len(rows) + 0.01 * z

    return of_quadratic if isinstance(objective, Quadratic) else of_samples


NOLOCO = {"momentum": 0.4, "outer_lr": 0.6, "pull": 0.9}

# The number of ranks, the algorithm, and its paper's loop for a gradient.
CASES = [
    (4, AllReduce(), lambda g: papers.all_reduce(g, 4, D, LR, STEPS)),
    (4, SGP(Star(4)), lambda g: papers.push_sum(g, Star(4), D, LR, STEPS)),
    (6, SGP(OnePeerExponential(6), overlap=1),
     lambda g: papers.push_sum(g, OnePeerExponential(6), D, LR, STEPS, overlap=1)),
    (5, SGP(Star(5), overlap=3), lambda g: papers.push_sum(g, Star(5), D, LR, STEPS, overlap=3)),
    (4, SGP(Complete(4), overlap=2),
     lambda g: papers.push_sum(g, Complete(4), D, LR, STEPS, overlap=2)),
    (5, OSGP(Ring(5)), lambda g: papers.push_sum(g, Ring(5), D, LR, STEPS, delay=1)),
    (4, OSGP(Star(4), delay=3), lambda g: papers.push_sum(g, Star(4), D, LR, STEPS, delay=3)),
    (4, OSGP(Star(4), biased=True),
     lambda g: papers.push_sum(g, Star(4), D, LR, STEPS, delay=1, biased=True)),
    (5, LocalSGD(4), lambda g: papers.streaming(g, 5, D, LR, STEPS, 4, papers.average_alone)),
    (4, LocalSGD(6, fragments=3, delay=2, mix=0.3),
     lambda g: papers.streaming(g, 4, D, LR, STEPS, 6, papers.average_alone,
                                fragments=3, delay=2, mix=0.3)),
    (4, DiLoCo(5), lambda g: papers.streaming(g, 4, D, LR, STEPS, 5, papers.nesterov(0.7))),
    (4, StreamingDiLoCo(7),
     lambda g: papers.streaming(g, 4, D, LR, STEPS, 7, papers.nesterov(0.4),
                                fragments=3, delay=5, mix=0.5)),
    (5, NoLoCo(RandomMatching(5), 3, **NOLOCO),
     lambda g: papers.noloco(g, RandomMatching(5), D, LR, STEPS, 3, **NOLOCO)),
    (4, NoLoCo(Hypercube(4), 5, fragments=2, delay=2, **NOLOCO),
     lambda g: papers.noloco(g, Hypercube(4), D, LR, STEPS, 5, fragments=2, delay=2, mix=0.5,
                             **NOLOCO)),
    (4, SlowMo(None, 4, 0.6, 0.8),
     lambda g: papers.slowmo(papers.Alone(4, LR, g, D), 4, 0.6, 0.8, STEPS)),
    (4, SlowMo(SGP(Star(4), overlap=1), 4, 0.6, 0.8),
     lambda g: papers.slowmo(papers.PushSum(Star(4), LR, g, D, overlap=1), 4, 0.6, 0.8, STEPS)),
    (4, SlowMo(OSGP(Star(4), biased=True), 4, 0.6),
     lambda g: papers.slowmo(papers.PushSum(Star(4), LR, g, D, delay=1, biased=True),
                             4, 0.6, 1.0, STEPS)),
    (6, Hierarchical(SGP(Star(3)), 2), lambda g: papers.hierarchical(g, Star(3), 2, D, LR, STEPS)),
    (6, Hierarchical(SGP(Ring(3), overlap=1), 2),
     lambda g: papers.hierarchical(g, Ring(3), 2, D, LR, STEPS, overlap=1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("n", "algorithm", "loop"), CASES, ids=[str(each)[:50] for _, each, _ in CASES]
)
def test_ranks_train_by_the_rules_of_the_papers(n, algorithm, loop):
    for objective in OBJECTIVES:
        run = simulate(algorithm, n, objective)
        shards = objective.divide(n, SEED)
        expected = loop(gradient_of(objective, shards))
        np.testing.assert_allclose(run.parameters, expected, rtol=1e-9, atol=1e-9)
        assert run.losses[-1] == pytest.approx(shards.loss(expected.mean(0)), rel=1e-9)
        assert len(run.losses) == len(run.steps)


REAL = [
    AllReduce(),
    SGP(OnePeerExponential(4)),
    SGP(Star(4), overlap=2),
    DPSGD(Ring(4), overlap=1),
    OSGP(OnePeerExponential(4), delay=2),
    OSGP(Star(4), biased=True),
    LocalSGD(5, fragments=2, delay=2),
    SlowMo(SGP(Star(4)), 4),
    SlowMo(OSGP(Star(4), biased=True), 4),
    SlowMo(None, 4, 0.3, 0.7),
    DiLoCo(6),
    StreamingDiLoCo(7, compressor=None),
    NoLoCo(RandomMatching(4), 3),
    NoLoCo(RandomMatching(4), 5, fragments=3, delay=2),
    Hierarchical(SGP(OnePeerExponential(2), overlap=1), 2),
]


def flat(module):
    return torch.cat([each.flatten() for each in module.parameters()])


class Trained(nn.Module):
    """A rank's quadratic, or its logistic regression, of one layer for each parameter."""

    def __init__(self, objective, rank):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(objective.dimension)
        )
        for each in self.parameters():
            nn.init.zeros_(each)
        self.objective, self.shards, self.rank = objective, objective.divide(4, SEED), rank

    def forward(self):
        x, shards, rank = flat(self), self.shards, self.rank
        if isinstance(self.objective, Quadratic):
            a, b = (torch.from_numpy(each[rank]) for each in (shards.curvatures, shards.minima))
            return (a * (x - b) ** 2).sum() / 2
        losses = nn.functional.softplus(-torch.from_numpy(shards.signed[rank]) @ x)
        return losses.mean() + 0.01 * (x @ x) / 2


def train_rank(rank, algorithm, objective):
    """Return the parameters of a rank of the library's own trainer, flushed."""
    model = Trained(objective, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    trainer = GossipDataParallel(model, optimizer, algorithm)
    for _ in range(STEPS):
        optimizer.zero_grad()
        trainer().backward()
        optimizer.step()
    trainer.flush()
    found = flat(model).detach().numpy()
    trainer.close()
    return found


@pytest.mark.slow  # trains 19 runs; the loops of papers.py are the fast reference
def test_ranks_train_as_those_of_the_library_do(ranks):
    quadratic = Quadratic(LR, D, 0.8, noise=0.0)
    logistic = LogisticRegression(LR, D, 0.8, batch=None, samples=9)
    cases = [*((each, quadratic) for each in REAL), *((each, logistic) for each in REAL[::4])]
    found = ranks.run_each(4, train_rank, cases)
    for (algorithm, objective), parameters in zip(cases, found, strict=True):
        run = simulate(algorithm, 4, objective)
        np.testing.assert_allclose(
            run.parameters, np.array(parameters), rtol=1e-9, atol=1e-11, err_msg=str(algorithm)
        )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["quadratic", "logistic"])
def test_other_results_are_those_without_an_objective(objective):
    for n, algorithm, _ in [*CASES, (6, ADPSGD(Ring(6)), None)]:
        plain, trained = (simulate(algorithm, n, each, stragglers=Stragglers(0.2))
                          for each in (None, objective))  # fmt: skip
        assert plain.losses is plain.parameters is plain.loss is None
        for name in ("times", "steps", "mixing_errors", "consensus_distances"):
            np.testing.assert_array_equal(getattr(plain, name), getattr(trained, name), name)
        assert (plain.seconds, plain.card_bytes) == (trained.seconds, trained.card_bytes)
        assert trained.parameters.shape == (n, D)


def test_the_minimum_is_that_of_the_mean():
    for objective in OBJECTIVES:
        shards = objective.divide(5, 1)
        least = shards.minimum
        assert shards.loss(least) == 0
        near = np.random.default_rng(0).standard_normal((50, D)) * 1e-3
        assert min(shards.loss(least + each) for each in near) > 0
        everything = np.tile(least, (5, 1))
        drawn = np.zeros((5, 1)) if isinstance(objective, Quadratic) else np.tile(range(9), (5, 1))
        slopes = shards.gradients(everything, drawn, slice(None))
        np.testing.assert_allclose(slopes.mean(0), 0, atol=1e-12)
        assert np.abs(slopes).max() > 0.05  # each rank's own minimum is elsewhere


def test_without_heterogeneity_shards_are_equal():
    quadratic = Quadratic(LR, D, 0.0).divide(3, 0)
    logistic = LogisticRegression(LR, D, 0.0).divide(3, 0)
    for each in (quadratic.curvatures, quadratic.minima, logistic.signed):
        assert (each == each[:1]).all()


@pytest.mark.slow
def test_local_steps_on_unequal_shards_end_above_all_reduce():
    """At the rate of both; and where Malinovsky et al. (arXiv 2004.01442) say that they end."""
    n, interval = 8, 10
    for make in (Quadratic, LogisticRegression):
        still = {"noise": 0.0} if make is Quadratic else {"batch": None}
        reduced, local = (simulate(each, n, make(LR, D, 1.0, **still), 4000)
                          for each in (AllReduce(), LocalSGD(interval)))  # fmt: skip
        assert reduced.loss < 1e-12
        assert local.loss > 1e-4
        equal = simulate(LocalSGD(interval), n, make(LR, D, 0.0, **still), 4000)
        assert equal.loss < 1e-12
    shards = Quadratic(LR, D, 1.0).divide(n, SEED)
    moved = 1 - (1 - LR * shards.curvatures) ** interval
    fixed = (moved * shards.minima).mean(0) / moved.mean(0)
    run = simulate(LocalSGD(interval), n, Quadratic(LR, D, 1.0, noise=0.0), 4000)
    np.testing.assert_allclose(run.parameters, np.tile(fixed, (n, 1)), rtol=1e-9)


@pytest.mark.slow
def test_the_floor_of_noise_falls_with_the_number_of_ranks():
    """SGD on equal quadratics ends at lr s^2 sum_j 1 / (2 n (2 - lr a_j)) on average."""
    curvatures = np.geomspace(1, 0.1, D)
    for n in (4, 32):
        objective = Quadratic(0.5, D, 0.0, noise=0.4)
        losses = [
            simulate_run(
                AllReduce(), n, LINKS, PROFILE, 1e6,
                num_steps=400, seed=seed, objective=objective,
            ).losses[-20:]
            for seed in range(20)
        ]  # fmt: skip
        expected = (0.5 * 0.4**2 / 2 / n / (2 - 0.5 * curvatures)).sum()
        assert np.mean(losses) == pytest.approx(expected, rel=0.15)


def test_a_loss_that_diverges_is_no_number():
    run = simulate(SGP(Ring(4), overlap=1), 4, Quadratic(50.0, D), 600)
    assert not np.isfinite(run.loss)
    assert np.isfinite(run.consensus_distances).all()


def test_mistakes_are_refused():
    for make, sentence in [
        (lambda: Quadratic(-0.1), "learning_rate must be positive, got -0.1"),
        (lambda: Quadratic(float("nan")), "learning_rate must be positive, got nan"),
        (lambda: Quadratic(0.1, 0), "dimension must be a positive integer, got 0"),
        (lambda: Quadratic(0.1, heterogeneity=-1), "heterogeneity must be finite and not negative"),
        (lambda: Quadratic(0.1, noise=-1.0), "noise must be finite and not negative, got -1.0"),
        (lambda: LogisticRegression(0.1, batch=0), "batch must be a positive integer, got 0"),
        (lambda: LogisticRegression(0.1, samples=0), "samples must be a positive integer, got 0"),
        (lambda: Quadratic(float("inf")), "learning_rate must be finite and not negative, got inf"),
        (lambda: LogisticRegression(0.1, None), "dimension must be a positive integer, got None"),
        (lambda: simulate(StreamingDiLoCo(9), 4, Quadratic(0.1, 2)),
         "dimension must be at least the algorithm's number of fragments, 3, got 2"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            make()
    with pytest.raises(TypeError, match=r"objective must be an object such as Quad.*, got the cl"):
        simulate(AllReduce(), 4, Quadratic)
