"""What algorithms refuse: where they are created, where they meet ranks, and on all of them."""

import math

import networkx as nx
import pytest
import torch

from pyparallel.compression import DGC, ErrorFeedback, Int8, Threshold, TopK
from pyparallel.gossip import (
    ADPSGD,
    DPSGD,
    OSGP,
    SGP,
    AllReduce,
    DiLoCo,
    Hierarchical,
    LeaderSGD,
    LocalSGD,
    NoLoCo,
    SlowMo,
)
from pyparallel.gossip.topology import (
    BaseGraph,
    BipartiteExponential,
    Complete,
    DirectedExponential,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
    Torus,
)
from pyparallel.training import Place
from tests.gossip.graphs import StarWithChords
from tests.gossip.loops import error_of, start

TOPOLOGY = r"^topology must be an object such as topology.Ring\(4\), got "
INNER = r"^inner must be an object such as SGP\(\), got "
WRONG_TYPES = [
    (lambda: SGP(nx.Graph), TOPOLOGY + r"the class Graph; .*$"),
    (lambda: SGP(4), TOPOLOGY + "4$"),
    (lambda: SGP(nx.cycle_graph(4)), TOPOLOGY + r".*; FromGraph\(graph\) takes a networkx graph$"),
    (lambda: DPSGD("ring"), TOPOLOGY + "'ring'$"),
    (lambda: OSGP(4), TOPOLOGY + "4$"),
    (lambda: OSGP(Ring(2), biased=1), "biased must be True or False, got 1"),
    (
        lambda: SGP(Ring(4), compressor=Int8),
        "^compressor must be .*, got the class Int8; create an",
    ),
    (lambda: SGP(Ring(2), compressor="int8"), "compressor must be .*, or None, got 'int8'"),
    (lambda: DiLoCo(4, compressor="int8"), "compressor must be an object such as Int8"),
    (lambda: SlowMo(SGP, 3), INNER + r"the class SGP; create an object, SGP\(...\)$"),
    (lambda: SlowMo("sgp", 3), INNER + "'sgp'$"),
    (lambda: Hierarchical(Ring(2), 2), INNER + r"Ring\(2\); wrap it, SGP\(Ring\(2\)\)$"),
    (
        lambda: Hierarchical(SGP(Ring(2)), 2, AllReduce),
        r"^within must be AllReduce\(\), got the cl",
    ),
]


def no_lo_co(**options):
    return lambda: NoLoCo(RandomMatching(2), **options)


def di_lo_co(**options):
    return lambda: DiLoCo(4, **options)


def leader(ranks_per_node=1, **options):
    return lambda: LeaderSGD(ranks_per_node, **options)


OUT_OF_RANGE = [
    *[
        (lambda overlap=overlap: SGP(Ring(2), overlap), "overlap must be a number of steps, at lea")
        for overlap in (-1, 1.5, "1")
    ],
    *[
        (lambda delay=delay: OSGP(Ring(2), delay), "delay must be a number of steps, at least 1, g")
        for delay in (0, -1, 1.5, "1", True)
    ],
    *[
        (lambda n=n: Hierarchical(SGP(Ring(2)), n), "ranks_per_node must be a positive number of r")
        for n in (0, 1.5, "2")
    ],
    (
        lambda: SGP(Ring(2), transport="nccl"),
        "transport must be .process_group. or .symmetric_memory., got .nccl.$",
    ),
    (lambda: LocalSGD(0), "interval must be a positive number of steps, got 0"),
    (lambda: DiLoCo(1.5), "interval must be a positive number of steps, got 1.5"),
    (
        lambda: DiLoCo(4, lambda _: torch.optim.SGD([torch.zeros(1)])),
        "outer_optimizer must return an optimizer of the tensors that .*, got SGD of others",
    ),
    (lambda: SlowMo(None, 3, momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
    (lambda: SlowMo(None, 3, outer_lr=0.0), "outer_lr must be positive, got 0.0"),
    (no_lo_co(interval=0), "interval must be a positive number of steps, got 0"),
    (no_lo_co(momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
    (no_lo_co(outer_lr=0.0), "outer_lr must be positive and finite, got 0.0"),
    (no_lo_co(outer_lr=math.nan), "outer_lr must be positive and finite, got nan"),
    (
        no_lo_co(compressor=Threshold(0.1)),
        "compressor must send messages of a fixed length, got",
    ),
    (no_lo_co(pull_turns=0), "pull_turns must be a positive integer, got 0"),
    (no_lo_co(pull=0.0), r"pull must be in \(0, 3\), .* got 0.0"),
    (no_lo_co(momentum=0.0, pull=2.0), r"pull must be in \(0, 2\), .* got 2.0"),
    (di_lo_co(delay=4), "delay must be below the interval of 4 steps, got 4"),
    (di_lo_co(delay=-1), "delay must be an integer of at least 0, got -1"),
    (di_lo_co(mix=1.0), r"mix must be in \[0, 1\), got 1.0"),
    (di_lo_co(fragments=5), "fragments must be from 1 to the 4 steps of the interval, got 5"),
    (di_lo_co(fragments=0), "fragments must be"),
    (di_lo_co(compressor=DGC(0.1)), "must not accumulate momentum for the differences of outer"),
    (leader(0), "ranks_per_node must be a positive number of ranks, got 0"),
    (leader(interval=0), "interval must be a positive number of steps, got 0"),
    (leader(interval=3), "global_interval must be a multiple of interval, got 16 and 3"),
    (leader(local_pull=-0.1), r"local_pull must be in \[0, 1\], got -0.1"),
    (leader(global_drift=math.nan), r"global_drift must be in \[0, 1\], got nan"),
    (leader(local_strength=-0.1), "local_strength must be finite and at least 0, got -0.1"),
    (leader(global_strength=math.inf), "global_strength must be finite and at least 0, got inf"),
    (
        leader(local_strength=1.0, local_pull=0.1),
        "strengths .* must not be given together with pulls .*, got local_strength, local_pull",
    ),
]


def test_a_wrong_type_or_number_is_one_error(subtests):
    for kind, rows in ((TypeError, WRONG_TYPES), (ValueError, OUT_OF_RANGE)):
        for place, (make, sentence) in enumerate(rows):
            with subtests.test(f"{place}: {sentence}"), pytest.raises(kind, match=sentence):
                make()


SYMMETRIC = [BaseGraph, BipartiteExponential, Complete, Hypercube, RandomMatching, Ring, Torus]
OTHERS = [DirectedExponential, OnePeerExponential, Star]


def test_topologies_that_an_algorithm_cannot_use_are_named():
    for algorithm, sentence in [
        *((DPSGD(kind(8)), None) for kind in SYMMETRIC),
        *((DPSGD(kind(8)), "must be symmetric in every round for DPSGD") for kind in OTHERS),
        *((DPSGD(kind(8)), "where round 0 is not") for kind in OTHERS),
        (DPSGD(Ring(3)), "must be for the process group's 8 ranks"),
        (NoLoCo(Ring(8)), "topology must be a Matching"),
        (NoLoCo(Hypercube(2)), "must be for the process group's 8 ranks"),
        (NoLoCo(Hypercube(8)), None),
    ]:
        error = algorithm.error_at(Place(8))
        assert (error is None) if sentence is None else (sentence in error), algorithm


class Variable(Int8):
    """A compressor whose messages have variable length."""

    fixed_length = False


class OtherOnRankOne(TopK):
    """A compressor that makes longer messages on rank 1, which its repr does not show."""

    def compress(self, tensor, state, residual=None):
        message = super().compress(tensor, state, residual)
        return (*message, torch.zeros(torch.distributed.get_rank()))


class NotForGossip(Int8):
    """A compressor that is not for gossip."""

    def error_at(self, place):
        return f"compressor must not serve {place.value}"


NOT_INNER = "inner must be a gossip algorithm, got "
SAME = "DisagreementError: all ranks must have the same "


def differ(algorithm, *others):
    """Return mistakes in each of which rank 1 has another algorithm than the other ranks."""
    sentence = f"{SAME}algorithm, got {type(algorithm).__name__}("
    return [
        (lambda rank, other=other: other if rank == 1 else algorithm, sentence) for other in others
    ]


MISTAKES = {  # by the number of ranks: an algorithm or a function of the rank, and the one error
    2: [
        (SlowMo(LeaderSGD(1), 3), f"{NOT_INNER}LeaderSGD"),
        (SlowMo(AllReduce(), 3), f"{NOT_INNER}AllReduce"),
        (Hierarchical(AllReduce(), 2), f"{NOT_INNER}AllRed"),
        (Hierarchical(AllReduce(), 1), f"{NOT_INNER}AllRed"),
        (SGP(Ring(2), compressor=ErrorFeedback(TopK(0.1))), "compressor must not have error feedb"),
        (SGP(Ring(2), compressor=Variable()), "compressor must make messages of fixed length for"),
        (SGP(Ring(2), compressor=NotForGossip()), "compressor must not serve gossip messages"),
        (SGP(Ring(2), compressor=OtherOnRankOne(0.1)), f"{SAME}message lengths of bucket 0, got "),
        *differ(DiLoCo(4), DiLoCo(4, delay=1)),
        *differ(NoLoCo(RandomMatching(2)), NoLoCo(RandomMatching(2, seed=1))),
        *differ(OSGP(Ring(2)), OSGP(Ring(2), 2), OSGP(Ring(2), biased=True), SGP(Ring(2), 1)),
        *differ(
            SGP(Ring(2), compressor=Int8()), SGP(Ring(2), compressor=Int8(seed=1)), SGP(Ring(2))
        ),
    ],
    3: [
        (Hierarchical(SGP(Ring(1)), 2), "ranks_per_node must divide the process group's 3 ranks"),
        (LeaderSGD(2), "ranks_per_node must divide the process group's 3 ranks, go"),
        (ADPSGD(StarWithChords(3)), "topology must be symmetric for ADPSGD (SGP takes any)"),
        (ADPSGD(Ring(4)), "topology must be for the process group's 3 ranks, got Ring"),
        *differ(ADPSGD(Ring(3)), ADPSGD(Ring(3), seed=1)),
    ],
    4: [
        (Hierarchical(SGP(Ring(4)), 2), "inner must be for 2 nodes as its ranks: topology must be"),
        (Hierarchical(LeaderSGD(1), 2), f"{NOT_INNER}LeaderS"),
        (SlowMo(Hierarchical(SGP(Ring(2)), 2), 3), f"{NOT_INNER}Hierarchical("),
    ],
}


def make_mistakes(rank, num_ranks):
    algorithms = [each for each, _ in MISTAKES[num_ranks]]
    return [error_of(start, each(rank) if callable(each) else each) for each in algorithms]


def test_a_mistake_is_one_error_on_every_rank(ranks, subtests):
    for num_ranks, rows in MISTAKES.items():
        errors = zip(*ranks.run(num_ranks, make_mistakes, num_ranks), strict=True)
        of_all = f"DisagreementError: ranks 0-{num_ranks - 1}: "
        for found, (_, rule) in zip(errors, rows, strict=True):
            sentence = rule if "Error: " in rule else of_all + rule
            with subtests.test(sentence):
                assert len(set(found)) == 1
                assert found[0].startswith(sentence), found[0]
