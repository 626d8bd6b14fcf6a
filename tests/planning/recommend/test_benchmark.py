"""The measurements behind a recommendation, on one rank and on several."""

import pytest
import torch
from torch import nn

from pyparallel.planning.recommend import (
    CANDIDATES,
    OUTER_STEPS,
    Link,
    Workload,
    benchmark,
    benchmark_ranks,
)

NAMES = [candidate.name for candidate in CANDIDATES]
ALGORITHMS = ["SGP", *(type(algorithm).__name__ for algorithm in OUTER_STEPS)]


def make_workload():
    module = nn.Linear(40, 30)
    return Workload(module, torch.ones(2, 40), lambda m, x: m(x).square().mean())


def measure(rank):
    return benchmark_ranks(make_workload(), torch.device("cpu"))


@pytest.mark.slow
def test_all_ranks_return_the_same(ranks):
    first, second = ranks.run(2, measure)
    assert first == second
    assert first.link.num_ranks == 2
    assert 0 < first.link.latency < 10
    assert 0 < first.link.bytes_per_second < 1e12
    assert [each.name for each in first.predictions] == NAMES
    assert [each.name for each in first.algorithm_predictions] == ALGORITHMS


@pytest.mark.slow
def test_a_slow_link_makes_steps_slow():
    found = benchmark(make_workload(), Link(1e3, 0.0, 4))
    dense, half, *_ = found.predictions
    assert dense.communication > 1.9 * half.communication > 0
    assert dense.step > dense.communication > found.compute.computing
    message, first, *_, last = found.algorithm_predictions
    assert message.step == pytest.approx(4 * 1230 / 1e3, rel=0.01)
    # 1,230 float32 every 500 steps; in two bits, with means of each block and biases, every 30.
    assert first.communication == pytest.approx(1.5 * 4 * 1230 / 1e3 / 500)
    assert first.communication < last.communication < dense.communication / 20


def test_one_rank_sends_nothing():
    found = benchmark(make_workload(), Link(1e3, 0.0, 1))
    every = [*found.predictions, *found.algorithm_predictions]
    assert {each.cost.wire_bytes for each in every} == {0.0}
    assert {each.communication for each in every} == {0.0}
