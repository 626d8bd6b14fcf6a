"""The link between ranks, measured by them."""

import torch

from pyparallel.recommend import measure_link
from pyparallel.recommend.link import slowest
from tests.workers import run_ranks


def measure(rank):
    cpu = torch.device("cpu")
    return measure_link(cpu), slowest([float(rank), 1.0 - rank], cpu)


def test_all_ranks_find_the_same_link():
    (first, slow), (second, _) = run_ranks(2, measure)
    assert first == second
    assert first.num_ranks == 2
    assert 0 < first.latency < 10
    assert 0 < first.bytes_per_second < 1e12
    assert slow == [1, 1]
