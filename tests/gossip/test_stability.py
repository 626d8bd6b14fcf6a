"""``stability_limit`` against closed forms, a simulation of the rules, and the library itself."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.compression import Int8
from pyparallel.gossip import DPSGD, OSGP, SGP, LocalSGD, stability_limit
from pyparallel.gossip.topology import (
    BaseGraph,
    Circulant,
    Complete,
    FromMatrix,
    Hypercube,
    Lazy,
    OnePeerExponential,
    Phases,
    Ring,
    Star,
    Torus,
)
from tests.cases import slow

NUM_STEPS = 160
WINDOW = 20


def test_one_rank_has_the_limits_of_gradient_descent():
    for momentum in (0.0, 0.5, 0.9):
        limit = stability_limit(SGP(Ring(1)), momentum=momentum)
        assert limit == pytest.approx(2 * (1 + momentum), abs=1e-5)  # Polyak 1964
        if momentum:
            nesterov = stability_limit(SGP(Ring(1)), momentum=momentum, nesterov=True)
            expected = 2 * (1 + momentum) / (1 + 2 * momentum)
            assert nesterov == pytest.approx(expected, abs=1e-5)


def test_combine_while_adapt_is_limited_by_the_least_eigenvalue():
    for graph in (Ring(5), Ring(8), Torus(9), Complete(4), Lazy(Ring(6), 0.5)):
        least = np.linalg.eigvalsh(graph.mixing_matrix(0))[0]
        for algorithm in (SGP(graph, overlap=1), DPSGD(graph, overlap=1)):
            assert stability_limit(algorithm) == pytest.approx(1 + least, abs=1e-5), graph


def test_a_circulant_topology_has_the_limit_of_its_matrices():
    for graph in (Ring(5), OnePeerExponential(6), OnePeerExponential(8, peers=2)):
        assert isinstance(graph, Circulant)
        matrices = Phases([(graph, None)])  # not circulant, so taken as matrices
        for make, momentum in itertools.product((SGP, OSGP), (0.0, 0.9)):
            limits = [
                stability_limit(make(each, 2), momentum=momentum) for each in (graph, matrices)
            ]
            assert limits[0] == pytest.approx(limits[1], abs=1e-4), graph


LIBRARY_CASES = [
    (SGP(Ring(4)), 0.0, False),
    (SGP(Ring(4), overlap=1), 0.0, False),
    (SGP(OnePeerExponential(4), overlap=1), 0.9, False),
    (SGP(OnePeerExponential(4), overlap=2), 0.0, False),
    (SGP(BaseGraph(4), overlap=4), 0.9, False),
    (SGP(Star(4), overlap=1), 0.0, False),
    (SGP(Lazy(Ring(4), 0.5), overlap=1), 0.6, True),
    (DPSGD(Hypercube(4), overlap=1), 0.0, False),
    (OSGP(OnePeerExponential(4)), 0.0, False),
    (OSGP(OnePeerExponential(4)), 0.9, False),
    (OSGP(OnePeerExponential(4), 2), 0.9, True),
    (OSGP(Ring(4), 4), 0.0, False),
    (OSGP(Star(4), 2), 0.9, False),
    (OSGP(Lazy(Ring(4), 0.5)), 0.0, False),
    (OSGP(Complete(4), 2), 0.6, True),
]


def descend(rank, algorithm, momentum, nesterov):
    """Return |z| after each step at 5 % below and above the limit, (2, steps)."""
    limit = stability_limit(algorithm, momentum=momentum, nesterov=nesterov)
    module = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
    groups = [
        {"params": [each], "lr": factor * limit}
        for each, factor in zip(module, (0.95, 1.05), strict=True)
    ]
    optimizer = torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov)
    wrapped = GossipDataParallel(module, optimizer, algorithm, nonfinite="allow")
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for each in module:
            each.copy_(torch.randn(3, generator=generator))
    norms = []
    for _ in range(2 * NUM_STEPS):
        for each in module:
            each.grad = each.detach().clone()
        optimizer.step()
        norms.append([each.detach().abs().max().item() for each in module])
    wrapped.flush()
    wrapped.close()
    return np.transpose(norms)


@pytest.mark.parametrize("cases", [LIBRARY_CASES[2:3], slow(LIBRARY_CASES)], ids=["one", "all"])
def test_the_library_diverges_above_the_limit_and_converges_below(ranks, cases):
    results = ranks.run_each(4, descend, cases, time_limit=180)
    for case, (below, above) in zip(cases, np.array(results).max(axis=1), strict=True):
        middle = slice(NUM_STEPS - WINDOW, NUM_STEPS)
        assert below[-WINDOW:].max() < 0.98 * below[middle].max(), case
        assert above[-WINDOW:].max() > 1.02 * above[middle].max(), case


def test_other_algorithms_are_errors():
    with pytest.raises(TypeError, match="algorithm must be an SGP, DPSGD or OSGP, got LocalSGD"):
        stability_limit(LocalSGD(4))
    with pytest.raises(ValueError, match="algorithm must have no compressor, got SGP"):
        stability_limit(SGP(Ring(4), compressor=Int8()))
    with pytest.raises(ValueError, match="algorithm must not be biased, got OSGP"):
        stability_limit(OSGP(Ring(4), biased=True))
    for momentum in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got"):
            stability_limit(SGP(Ring(4)), momentum=momentum)
    with pytest.raises(ValueError, match="momentum must be above 0 for nesterov"):
        stability_limit(SGP(Ring(4)), nesterov=True)
    with pytest.raises(ValueError, match="topology must have at most 32 ranks, unless"):
        stability_limit(SGP(Torus(36)))
    with pytest.raises(ValueError, match="topology must have at most 32 ranks, unless"):
        stability_limit(SGP(FromMatrix(np.full((40, 40), 1 / 40))))
