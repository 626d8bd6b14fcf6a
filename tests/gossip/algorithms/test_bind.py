"""The topology of an algorithm, once the number of ranks is known."""

import pytest
import torch
from torch import nn

from pyparallel.gossip import (
    ADPSGD,
    DPSGD,
    SGP,
    AllReduce,
    DiLoCo,
    GossipDataParallel,
    Hierarchical,
    NoLoCo,
    SlowMo,
    stability_limit,
)
from pyparallel.gossip.topology import (
    BaseGraph,
    FromGraph,
    Hypercube,
    Lazy,
    Matching,
    OnePeerExponential,
    RandomMatching,
    Ring,
)
from pyparallel.training import Place
from tests.workers import on_ranks


@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_without_a_topology_it_is_the_best_for_that_many_ranks(num_ranks):
    best = OnePeerExponential if num_ranks in (1, 2, 4, 8) else BaseGraph
    for algorithm, kind in [
        (SGP(overlap=1), best), (DPSGD(), BaseGraph), (ADPSGD(), BaseGraph),
        (NoLoCo(), RandomMatching), (SlowMo(SGP(), 3), best), (SGP(Ring), Ring),
    ]:  # fmt: skip
        bound = algorithm.bind(num_ranks)
        topology = getattr(bound, "inner", bound).bound_topology
        assert (type(topology), topology.num_ranks) == (kind, num_ranks)
        assert repr(topology) in repr(bound)
        assert bound.error_at(Place(num_ranks)) is None


def test_only_what_depends_on_the_number_of_ranks_is_bound():
    for algorithm in (SGP(Ring(4), overlap=1), AllReduce(), DiLoCo(3), SlowMo(None, 3)):
        assert algorithm.bind(4) is algorithm
    assert repr(Hierarchical(SGP(), 2).bind(6)) == repr(Hierarchical(SGP(BaseGraph(3)), 2))
    assert "topology=None" in repr(SGP())


def test_a_topology_that_does_not_fit_names_one_that_does():
    fits = r"; leave it out for BaseGraph\(6, peers=1\)$"
    for kind, reason in [
        (Hypercube, "Hypercube: num_ranks must be a power of two, got 6"),
        (Lazy, "Lazy: .* missing 1 required positional argument: 'gamma'"),
        (FromGraph, "FromGraph: Input is not a known data type for conversion."),
        (Matching, "Matching: Can't instantiate abstract class Matching .*"),
    ]:
        rule = "topology must be a class for 6 ranks, got "
        with pytest.raises(ValueError, match="^" + rule + reason + fits):
            SlowMo(SGP(kind), 3).bind(6)
    error_text = SGP(Ring(4)).bind(6).error_at(Place(6))
    assert error_text == (
        "topology must be for the process group's 6 ranks, got Ring(4); leave it out for "
        "BaseGraph(6, peers=1)"
    )
    with pytest.raises(ValueError, match=r"must be bound to a number of ranks, got SGP\(topology="):
        stability_limit(SGP())


@on_ranks(6)
def test_six_ranks(rank):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for algorithm in (SGP(Hypercube), SGP() if rank else SGP(Hypercube)):
        with pytest.raises(ValueError, match=r"got Hypercube: .*; leave it out for BaseGraph\(6"):
            GossipDataParallel(model, optimizer, algorithm)
    trainer = GossipDataParallel(model, optimizer, SGP(overlap=1))
    assert repr(trainer.algorithm) == repr(SGP(BaseGraph(6), overlap=1))
    assert "topology=BaseGraph(6, peers=1), overlap=1" in trainer.extra_repr()
