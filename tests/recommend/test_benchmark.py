"""The measurements behind a recommendation, on one rank and on several."""

import torch
from torch import nn

from pyparallel.recommend import CANDIDATES, Link, Workload, benchmark, benchmark_ranks

NAMES = [candidate.name for candidate in CANDIDATES]


def make_workload():
    module = nn.Linear(40, 30)
    return Workload(module, torch.ones(2, 40), lambda m, x: m(x).square().mean())


def measure(rank):
    return benchmark_ranks(make_workload(), torch.device("cpu"))


def test_all_ranks_return_the_same(ranks):
    first, second = ranks.run(2, measure)
    assert first == second
    assert first.link.num_ranks == 2
    assert 0 < first.link.latency < 10
    assert 0 < first.link.bytes_per_second < 1e12
    assert [each.name for each in first.predictions] == NAMES


def test_a_slow_link_makes_steps_slow():
    found = benchmark(make_workload(), Link(1e3, 0.0, 4))
    dense, half, *_ = found.predictions
    assert dense.communication > 1.9 * half.communication > 0
    assert dense.step > dense.communication > found.compute.backward
