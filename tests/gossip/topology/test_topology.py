"""Topologies: one contract for all, then the properties of each."""

import functools
import itertools
import math

import networkx as nx
import numpy as np
import pytest

from pyparallel.gossip.topology import (
    BaseGraph,
    BipartiteExponential,
    Complete,
    DirectedExponential,
    DirectedLinear,
    FromGraph,
    FromMatrix,
    HierarchicalTopology,
    Hypercube,
    Lazy,
    OnePeerExponential,
    Phases,
    RandomMatching,
    Ring,
    Star,
    TimeVarying,
    Topology,
    Torus,
    mixing_curve,
    spectral_gap,
    uniform_share,
)
from tests.cases import slow
from tests.gossip.graphs import Broken, StarWithChords

MAKERS = {
    "Ring": Ring,
    "OnePeerExponential": OnePeerExponential,
    "OnePeerExponential, two peers": lambda n: OnePeerExponential(n, peers=min(2, max(1, n - 1))),
    "DirectedExponential": DirectedExponential,
    "DirectedLinear": DirectedLinear,
    "Complete": Complete,
    "BipartiteExponential": lambda n: BipartiteExponential(n + n % 2),
    "Hypercube": lambda n: Hypercube(1 << (n - 1).bit_length()),
    "RandomMatching": RandomMatching,
    "Torus": Torus,
    "Star": Star,
    "Star, last": lambda n: Star(n, center=n - 1),
    "BaseGraph": BaseGraph,
    "BaseGraph, two peers": lambda n: BaseGraph(n, peers=2),
    "BaseGraph, four peers": lambda n: BaseGraph(n, peers=4),
    "HierarchicalTopology": lambda n: HierarchicalTopology(n + n % 2, 2),
    "HierarchicalTopology, ring": lambda n: HierarchicalTopology(3 * n, n, Ring),
    "TimeVarying": lambda n: TimeVarying([Ring(n), StarWithChords(n)]),
    "Lazy": lambda n: Lazy(Ring(n), gamma=0.3),
    "Phases": lambda n: Phases([(Complete(n), 3), (Star(n), 2)]),
    "open-ended Phases": lambda n: Phases([(Star(n), 3), (OnePeerExponential(n), None)]),
    "Phases in turn": lambda n: TimeVarying([Phases([(Star(n), 2), (Ring(n), None)]), Ring(n)]),
    "lazy Phases": lambda n: Lazy(Phases([(Complete(n), 2), (Ring(n), None)]), 0.5),
    "FromGraph": lambda n: FromGraph(nx.star_graph(n - 1)),
    "FromMatrix": lambda n: FromMatrix(StarWithChords(n).mixing_matrix(0)),
    "StarWithChords": StarWithChords,
}
SIZES, LARGE_SIZES = [*range(1, 11), 16], [*range(11, 16), 17, 32, 33, 64]


def rounds_to_average(topology: Topology, limit: int = 12) -> int | None:
    """Return the number of rounds to the exact average on all ranks, or None above the limit."""
    product = np.eye(topology.num_ranks)
    for index in range(limit):
        if np.allclose(product, 1 / topology.num_ranks, rtol=0, atol=1e-9):
            return index
        product = topology.mixing_matrix(index) @ product
    return None


def check_contract(topology):
    num_ranks, degrees = topology.num_ranks, []
    topology.validate()
    for index in topology.rounds:
        matrix = topology.mixing_matrix(index)
        assert (matrix >= 0).all(), topology
        assert (np.diag(matrix) > 0).all(), topology
        np.testing.assert_allclose(matrix.sum(axis=0), 1, 0, 1e-15, err_msg=str(topology))
        if topology.regular:
            weights = [math.fsum(row) for row in matrix]
            assert weights == [1.0] * num_ranks, topology
        receivers = [[] for _ in range(num_ranks)]
        for rank in range(num_ranks):
            for sender in topology.in_peers(rank, index):
                receivers[sender].append(rank)
        for rank in range(num_ranks):
            assert sorted(topology.out_peers(rank, index)) == receivers[rank], topology
            degrees.append(len(receivers[rank]))
        if index >= topology.preperiod:
            again = topology.mixing_matrix(index + topology.period)
            np.testing.assert_array_equal(matrix, again, err_msg=str(topology))
    for index in range(3 * len(topology.rounds)):
        first = topology.equivalent_round(index)
        assert first in topology.rounds, topology
        for rank in range(num_ranks):
            same = topology.neighbors(rank, index) == topology.neighbors(rank, first)
            assert same, (topology, index)
    assert topology.degree == max(degrees), topology


@pytest.mark.parametrize("sizes", [SIZES, slow(LARGE_SIZES)], ids=["small", "large"])
@pytest.mark.parametrize("name", MAKERS)
def test_contract(name, sizes):
    for num_ranks in sizes:
        topology = MAKERS[name](num_ranks)
        assert topology.num_ranks >= num_ranks  # the next valid number
        check_contract(topology)


def test_rounds_to_the_exact_average():
    for topology, rounds in [
        *[(OnePeerExponential(2**m), m) for m in range(7)],
        (OnePeerExponential(9, peers=2), 2),
        (OnePeerExponential(27, peers=2), 3),
        (OnePeerExponential(16, peers=3), 2),
        (OnePeerExponential(64, peers=3), 3),
        *[(DirectedExponential(2**m), 2 * m - 1) for m in range(1, 6)],
        *[(Complete(n), 1) for n in (2, 3, 7, 16)],
        *[(OnePeerExponential(n), None) for n in (3, 6, 12)],  # geometric, never exact
        *[(Hypercube(2**m), m) for m in range(6)],
        (HierarchicalTopology(8, 2), 4),
        (HierarchicalTopology(8, 2, Complete), 2),
        (BaseGraph(5), 5),
        (BaseGraph(6), 4),
        (BaseGraph(6, peers=2), 2),
        (BaseGraph(25), 9),
    ]:
        assert rounds_to_average(topology) == rounds, topology


@pytest.mark.parametrize("sizes", [range(1, 28), slow(range(28, 70))])
def test_base_graph_is_exact_within_its_bound_for_any_number_of_ranks(sizes):
    for peers, num_ranks in itertools.product([1, 2, 3, 4, 7], sizes):
        topology = BaseGraph(num_ranks, peers=peers)
        log = math.log(num_ranks, peers + 1)
        assert topology.degree <= peers, topology
        assert topology.regular, topology
        rounds = rounds_to_average(topology, limit=20)
        assert rounds is not None, topology
        assert rounds <= topology.period <= 2 * log + 2, topology


@pytest.mark.parametrize("num_ranks", [300, slow(9999)])
def test_base_graph_of_many_ranks(num_ranks):
    topology = BaseGraph(num_ranks)
    curve = mixing_curve(topology, topology.period)
    assert topology.period <= 2 * math.log2(num_ranks) + 2
    assert curve[-1] < 1e-6  # shares are rounded to 2**-40
    assert curve[-2] > 1e-3


def test_random_matchings_depend_on_the_seed_alone():
    rounds = [
        [RandomMatching(9, seed=seed).partner(3, index) for index in range(20)]
        for seed in (1, 1, 2)
    ]
    assert rounds[0] == rounds[1] != rounds[2]
    unmatched = [rank for rank in range(9) if RandomMatching(9).partner(rank, 5) is None]
    assert len(unmatched) == 1


def test_spectral_gap():
    for topology, gap in [
        (Ring(12), 2 / 3 * (1 - math.cos(2 * math.pi / 12))),
        (Torus(16), 2 / 5),
        (Complete(5), 1.0),
        (OnePeerExponential(8), 1.0),
        (Hypercube(16), 1.0),
        (BaseGraph(11), 1.0),
        (Star(1), 1.0),
    ]:
        assert spectral_gap(topology) == pytest.approx(gap, abs=1e-6), topology


def test_the_mixing_curve_decreases_at_the_mixing_rate():
    for topology in (Ring(30), Torus(30), Star(9), OnePeerExponential(12)):
        gap = spectral_gap(topology)
        half = topology.period * math.ceil(5 / gap / topology.period)
        curve = mixing_curve(topology, 2 * half)
        assert curve[0] == 1.0
        rate = 1 - (curve[2 * half] / curve[half]) ** (1 / half)
        assert rate == pytest.approx(gap, rel=0.05), topology


def test_power_iteration_agrees_with_the_eigenvalues():
    torus = Torus(20 * 25)  # too many ranks for the dense eigenvalues
    gap = 1 - (1 + 2 + 2 * math.cos(2 * math.pi / 25)) / 5
    assert spectral_gap(torus) == pytest.approx(gap, rel=1e-2)


def test_edge_weights_of_custom_graphs_are_shares():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.25), (1, 0, 0.5), (1, 2, 0.125), (2, 0, 0.75)])
    topology = FromGraph(graph)
    topology.validate()
    expected = np.array([[0.75, 0.5, 0.75], [0.25, 0.375, 0], [0, 0.125, 0.25]])
    np.testing.assert_array_equal(topology.mixing_matrix(0), expected)
    np.testing.assert_array_equal(FromMatrix(expected).mixing_matrix(0), expected)
    assert not topology.regular
    assert FromMatrix(Ring(5).mixing_matrix(0)).regular


WEIGHTED = nx.DiGraph([(0, 1), (1, 0)])
WEIGHTED.edges[0, 1]["weight"] = 0.5


INVALID = [
    (lambda: Hypercube(6), "num_ranks must be a power of two, got 6; the nearest are 4 and 8"),
    (lambda: BipartiteExponential(5), "num_ranks must be even, got 5; the nearest are 4 and 6"),
    (
        lambda: Torus(6, num_rows=4),
        r"num_rows must be one of \[1, 2, 3, 6\] for 6 ranks, got 4",
    ),
    (lambda: Star(4, center=4), "center must be a rank from 0 to 3, got 4"),
    (lambda: BaseGraph(4, peers=0), "peers must be a positive integer, got 0"),
    (lambda: RandomMatching(4, period=0), "period must be a positive integer, got 0"),
    (lambda: HierarchicalTopology(6, 4), "ranks_per_node must divide the 6 ranks, got 4"),
    (lambda: TimeVarying([Ring(3), Ring(4)]), r"for one number of ranks, got \[3, 4\]"),
    (lambda: TimeVarying([]), r"for one number of ranks, got \[\]"),
    (lambda: Lazy(Ring(3), gamma=0), r"gamma must be in \(0, 1\], got 0"),
    (lambda: Phases([(Ring(3), 1), (Ring(4), 1)]), r"for one number of ranks, got \[3, 4\]"),
    (lambda: Phases([(Ring(4), 0)]), r"at least its topology's period, 1 for Ring\(4\), got 0"),
    (lambda: Phases([(Ring(4), True)]), "at least its topology's period, 1 for .*, got True"),
    (lambda: Phases([(Ring(4), 1.5)]), "at least its topology's period, 1 for .*, got 1.5"),
    (
        lambda: Phases([(OnePeerExponential(4), 1), (Ring(4), None)]),
        "at least its topology's period, 2 for .*, got 1",
    ),
    (lambda: Phases([]), r"phases must hold at least one pair \(topology, rounds\), got none"),
    (
        lambda: Phases([(Ring(4), None), (Star(4), 3)]),
        r"a number of rounds, except for the last, got None for Ring\(4\) before it",
    ),
    (lambda: Phases([(Ring(3), 2), (FromMatrix(np.eye(3)), None)]).validate(), "must connect"),
    (
        lambda: Lazy(Phases([(Ring(3), 2), (FromMatrix(np.eye(3)), None)]), 0.5).validate(),
        "must co",
    ),
    (lambda: Phases([(FromMatrix(np.eye(3)), 1)]).validate(), "must connect every rank"),
    (lambda: FromGraph(nx.path_graph(["a", "b"])), "must have the ranks 0 to 1 as its nodes"),
    (lambda: FromGraph(WEIGHTED), "a weight on every edge or on none, got 1 on 2 edges"),
    (lambda: FromMatrix(np.ones((2, 3))), r"matrix must be square, got shape \(2, 3\)"),
    (lambda: FromMatrix(np.eye(3) * 0.9), "must have column sums 1, got 0.9 in column 0"),
    (lambda: FromMatrix([[1.5, 0], [-0.5, 1]]), "matrix must be nonnegative, got -0.5"),
    (lambda: FromMatrix(np.eye(3)).validate(), "must connect every rank to every other"),
    (lambda: FromGraph(nx.DiGraph([(0, 1)])).validate(), "must connect every rank"),
    *[
        (lambda kind=kind, n=n: kind(n), "num_ranks must be a positive integer, got")
        for kind in (Ring, OnePeerExponential, DirectedExponential, Complete)
        for n in (0, -1, 2.0, "4")
    ],
    *[
        (lambda n=n: OnePeerExponential(4, peers=n), "peers must be between 1 and 3 for 4 ranks, g")
        for n in (0, 4, 1.5)
    ],
]


def test_invalid_graphs_are_an_error():
    for make, sentence in INVALID:
        with pytest.raises(ValueError, match=sentence):
            make()


def test_shares_add_up_without_rounding():
    for num_peers in [*range(1, 130), 999]:
        share = uniform_share(num_peers)
        kept = 1 - num_peers * share
        total = functools.reduce(lambda total, share: total + share, [share] * num_peers, kept)
        assert total == 1, num_peers
        assert abs(share - 1 / (num_peers + 1)) <= 2**-41, num_peers


class NoReceives(Broken):
    def in_peers(self, rank, round_index):
        return ()


class DuplicateReceives(Broken):
    def in_peers(self, rank, round_index):
        return (1 - rank,) * 2


def test_validate_finds_the_violation():
    for topology, sentence in [
        (Broken((0,), (0,)), r"rank 0: out_peers must be distinct other ranks, got \(0,\)"),
        (Broken((1, 1), (0,)), r"rank 0: out_peers must be distinct other ranks, got \(1, 1\)"),
        (Broken((2,), (0,)), r"rank 0: out_peers must be distinct other ranks, got \(2,\)"),
        (Broken((1,), ()), "must connect every rank to every other over its period, got 2"),
        (Broken((1,), (0,), share=1.0), r"sum to less than 1, got \(1.0,\)"),
        (Broken((1,), (0,), share=-0.1), r"shares must be positive, .*, got \(-0.1,\)"),
        (
            DuplicateReceives((1,), (0,)),
            r"rank 0: in_peers must be the ranks .* once each, got \(1, 1\)",
        ),
        (NoReceives((1,), (0,)), "rank 0: sends to 1, which does not receive from it"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            topology.validate()


def test_topologies_are_composed_of_topologies():
    for make, sentence in [
        (lambda: Lazy(Ring, 0.5), r"topology must be an object .*, got the class Ring; create an"),
        (lambda: TimeVarying([Ring(2), Ring]), "each of topologies must be .*, got the class Ring"),
        (lambda: Phases([Ring(3)]), r"each of phases must be a pair \(topology, rounds\), got R"),
        (lambda: Phases([("ring", 3)]), "each topology of phases must be .*, got 'ring'"),
        (
            lambda: HierarchicalTopology(4, 2, between=Ring(2)),
            r"between must be a function of the number of nodes such as Ring, got Ring\(2\); pass",
        ),
    ]:
        with pytest.raises(TypeError, match=sentence):
            make()


def test_an_open_ended_phase_goes_on_for_good():
    dense, sparse = Complete(4), OnePeerExponential(4)
    schedule = Phases([(dense, 3), (sparse, None)])
    assert (schedule.preperiod, schedule.period, schedule.degree) == (3, 2, 3)
    for index in range(3):
        np.testing.assert_array_equal(schedule.mixing_matrix(index), dense.mixing_matrix(0))
        assert schedule.neighbors(1, index).is_complete
    for index in range(3, 20):
        np.testing.assert_array_equal(
            schedule.mixing_matrix(index), sparse.mixing_matrix(index - 3)
        )
        assert not schedule.neighbors(1, index).is_complete
    assert spectral_gap(schedule) == pytest.approx(spectral_gap(sparse))
    assert mixing_curve(schedule, 9)[1] < 1e-9
    curve = mixing_curve(Phases([(Lazy(dense, 0.1), 3), (Ring(4), None)]), 9)
    assert curve[3] / curve[2] > 0.8 > curve[9] / curve[8]  # follows the schedule


def test_schedules_differ_in_their_fingerprints():
    a, b = Ring(4), OnePeerExponential(4)
    schedules = [
        Phases([(a, 2), (b, None)]),
        Phases([(a, 2), (b, 2)]),
        Phases([(a, 3), (b, None)]),
        Phases([(a, None)]),
        Phases([(a, 2), (Phases([(b, 2), (a, None)]), None)]),
    ]
    for wrap in (lambda each: each, lambda each: Lazy(each, 0.5)):
        assert len({wrap(each).fingerprint() for each in schedules}) == len(schedules)


def test_only_rounds_with_equal_shares_to_all_are_complete():
    for topology, expected in [
        (Complete(5), True),
        (Ring(3), True),
        (OnePeerExponential(2), False),  # one message is as short
        (Lazy(Complete(5), 0.5), False),
        (Star(5), False),
        (Torus(8), False),
    ]:
        found = {topology.neighbors(rank, 0).is_complete for rank in range(topology.num_ranks)}
        assert found == {expected}, topology
