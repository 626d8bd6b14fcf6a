"""Algorithms, topologies and compressors of a wrong type: one TypeError where they are given."""

import networkx as nx
import pytest

from pyparallel.compression import Int8
from pyparallel.gossip import ADPSGD, DPSGD, SGP, AllReduce, Hierarchical, NoLoCo, SlowMo
from pyparallel.gossip.algorithms.base import find_algorithm_error
from pyparallel.gossip.topology import RandomMatching, Ring

TOPOLOGY = r"^topology must be an object such as topology.Ring\(4\), got "
INNER = r"^inner must be an object such as SGP\(topology.Ring\(4\)\), got "
MISTAKES = [
    (lambda: SGP(Ring), TOPOLOGY + r"the class Ring; create an object, Ring\(...\)$"),
    (lambda: SGP(4), TOPOLOGY + "4$"),
    (lambda: SGP(None), TOPOLOGY + "None$"),
    (lambda: SGP(nx.cycle_graph(4)), TOPOLOGY + r".*; FromGraph\(graph\) takes a networkx graph$"),
    (lambda: DPSGD("ring"), TOPOLOGY + "'ring'$"),
    (lambda: ADPSGD(Ring), TOPOLOGY + "the class Ring"),
    (lambda: NoLoCo(RandomMatching), TOPOLOGY + "the class RandomMatching"),
    (
        lambda: SGP(Ring(4), compressor=Int8),
        "^compressor must be .*, got the class Int8; create an",
    ),
    (lambda: SlowMo(SGP, 3), INNER + r"the class SGP; create an object, SGP\(...\)$"),
    (lambda: SlowMo("sgp", 3), INNER + "'sgp'$"),
    (lambda: Hierarchical(Ring(2), 2), INNER + r"Ring\(2\); wrap it, SGP\(Ring\(2\)\)$"),
    (
        lambda: Hierarchical(SGP(Ring(2)), 2, AllReduce),
        r"^within must be AllReduce\(\), got the cl",
    ),
]


def test_a_wrong_type_is_one_error(subtests):
    for make, sentence in MISTAKES:
        with subtests.test(sentence), pytest.raises(TypeError, match=sentence):
            make()


class Minimal:
    """An algorithm by its methods alone."""

    def start(self, *arguments):
        raise NotImplementedError

    config_fields = validation_error = start


def test_an_algorithm_is_known_by_its_methods():
    for algorithm in (SGP(Ring(2)), AllReduce(), SlowMo(None, 3), Minimal()):
        assert find_algorithm_error(algorithm) is None
