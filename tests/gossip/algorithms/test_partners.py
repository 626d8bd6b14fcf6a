"""Active and passive ranks on each edge, and the choice of neighbors."""

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


def topologies(sizes):
    """Return all symmetric topologies of these sizes; some exist for even or other numbers only."""
    for kind in SYMMETRIC:
        for num_ranks in sizes:
            if kind is not BipartiteExponential or num_ranks % 2 == 0:
                yield kind(num_ranks)


def test_each_edge_has_one_active_and_one_passive_rank():
    for topology in topologies([1, 2, 3, 4, 5, 8, 12]):
        ranks, partners = range(topology.num_ranks), Partners(topology)
        assert partners.find_asymmetry() is None
        edges = [(rank, peer) for rank in ranks for peer in partners.passive_neighbors(rank)]
        assert {frozenset(edge) for edge in edges} == edges_of(topology), topology
        assert len(edges) == len(edges_of(topology)), topology
        assert sorted(edges) == sorted(
            (active, rank) for rank in ranks for active in partners.active_neighbors(rank)
        ), topology


def test_ranks_never_wait_for_each_other_in_a_cycle():
    for topology in topologies([6]):
        partners = Partners(topology)

        def longest_wait(rank, partners=partners):  # does not return if there is a cycle
            return 1 + max(map(longest_wait, partners.passive_neighbors(rank)), default=0)

        assert max(map(longest_wait, range(6))) <= 6, topology


def test_the_sides_of_a_bipartite_graph_are_active_and_passive():
    for topology in BIPARTITE:
        partners = Partners(topology)
        for rank in range(topology.num_ranks):
            assert not (partners.passive_neighbors(rank) and partners.active_neighbors(rank))


def test_a_topology_that_is_not_symmetric_is_an_error():
    assert Partners(OnePeerExponential(8)).find_asymmetry() == (
        "topology must be symmetric for ADPSGD (SGP takes any), got OnePeerExponential(8, "
        "peers=1), where 0 sends to 1 and 1 never sends to 0"
    )


def test_choices_are_reproducible_and_uniform():
    first, second = Partners(Complete(5), seed=3), Partners(Complete(5), seed=3)
    rank = next(rank for rank in range(5) if len(first.passive_neighbors(rank)) == 4)
    choices = [first.choose(rank, index) for index in range(4000)]
    assert choices == [second.choose(rank, index) for index in range(4000)]
    for peer in first.passive_neighbors(rank):
        assert 850 < choices.count(peer) < 1150  # 1000 expected, standard deviation 27
    assert choices != [Partners(Complete(5), seed=4).choose(rank, index) for index in range(4000)]
