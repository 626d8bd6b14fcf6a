"""The arithmetic of the link; test_benchmark.py measures one between ranks."""

import pytest
import torch

from pyparallel.planning.recommend import link


def test_the_bandwidth_is_that_of_a_ring_beyond_its_latency(monkeypatch):
    seconds = {2**23: 1.5, 1: 0.5}
    monkeypatch.setattr(link.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(link, "_time_all_reduce", lambda numel, device: seconds[numel])
    found = link.measure_link(torch.device("cpu"))
    assert found.num_ranks == 4
    assert found.latency == 0.5
    assert found.bytes_per_second == pytest.approx(1.5 * 4 * 2**23)
