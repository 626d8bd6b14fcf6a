"""Who asks whom: policy by itself."""

import pytest

from pyparallel.gossip.algorithms.partners import Partners
from pyparallel.gossip.topology import (
    BaseGraph,
    BipartiteExponential,
    Complete,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
    Torus,
)

SYMMETRIC = [Ring, Star, Complete, BaseGraph, RandomMatching, Torus, BipartiteExponential]
BIPARTITE = [Ring(2), Ring(8), Hypercube(8), Star(7), BipartiteExponential(8)]


def edges_of(topology):
    return {
        frozenset((rank, peer))
        for index in range(topology.period)
        for rank in range(topology.num_ranks)
        for peer in topology.out_peers(rank, index)
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("kind", SYMMETRIC)
def test_on_each_edge_one_asks_and_the_other_answers(kind, num_ranks):
    try:
        topology = kind(num_ranks)
    except ValueError:
        pytest.skip("not a size of this topology")
    partners = Partners(topology)
    assert partners.validation_error() is None
    asked = [(rank, peer) for rank in range(num_ranks) for peer in partners.asked_by(rank)]
    assert {frozenset(edge) for edge in asked} == edges_of(topology)
    assert len(asked) == len(edges_of(topology))
    assert sorted(asked) == sorted(
        (asker, rank) for rank in range(num_ranks) for asker in partners.askers_of(rank)
    )


@pytest.mark.parametrize("kind", SYMMETRIC)
def test_who_waits_for_each_other_never_stands_in_a_circle(kind):
    partners = Partners(kind(6))

    def longest_wait(rank):
        return 1 + max(map(longest_wait, partners.asked_by(rank)), default=0)  # ends, or no test

    assert max(map(longest_wait, range(6))) <= 6


@pytest.mark.parametrize("topology", BIPARTITE, ids=repr)
def test_two_parts_are_those_who_ask_and_those_who_answer(topology):
    partners = Partners(topology)
    for rank in range(topology.num_ranks):
        assert not (partners.asked_by(rank) and partners.askers_of(rank))


def test_a_topology_that_is_not_symmetric_is_named():
    assert Partners(OnePeerExponential(8)).validation_error() == (
        "topology must be symmetric for ADPSGD (SGP takes any), got OnePeerExponential(8, "
        "peers=1), where 0 sends to 1 and 1 never sends to 0"
    )


def test_choices_are_the_same_everywhere_and_as_likely():
    first, second = Partners(Complete(5), seed=3), Partners(Complete(5), seed=3)
    rank = next(rank for rank in range(5) if len(first.asked_by(rank)) == 4)
    choices = [first.choose(rank, index) for index in range(4000)]
    assert choices == [second.choose(rank, index) for index in range(4000)]
    for peer in first.asked_by(rank):
        assert 850 < choices.count(peer) < 1150  # 1000 expected, standard deviation 27
    assert choices != [Partners(Complete(5), seed=4).choose(rank, index) for index in range(4000)]
