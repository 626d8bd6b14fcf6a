"""DPSGD: SGP restricted to symmetric topologies."""

import torch

from pyparallel.gossip import DPSGD, SGP
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
from tests.gossip.loops import batches, train_wrapped

SYMMETRIC = [BipartiteExponential, Hypercube, RandomMatching, Ring, Torus, Complete, BaseGraph]


def train_both(rank, topology, overlap):
    data = list(batches(rank, 6))
    return [train_wrapped(kind(topology, overlap=overlap), data) for kind in (DPSGD, SGP)]


def test_is_sgp_on_the_same_matrix(ranks):
    for overlap in (0, 1):
        for ours, sgp in ranks.run(4, train_both, Torus(4), overlap):
            assert torch.equal(ours, sgp), overlap


def test_symmetric_topologies_are_accepted():
    for kind in SYMMETRIC:
        assert DPSGD(kind(8)).validation_error(8) is None, kind


def test_other_topologies_are_an_error():
    for kind in (DirectedExponential, OnePeerExponential, Star):
        error = DPSGD(kind(8)).validation_error(8)
        assert "topology must be symmetric in every round for DPSGD" in error
        assert "where round 0 is not" in error


def test_errors_of_sgp_are_errors():
    assert "must be for the process group's 4 ranks" in DPSGD(Ring(3)).validation_error(4)
