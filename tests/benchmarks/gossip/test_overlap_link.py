"""Rounds over a link that returns every message change nothing; what of their time is hidden."""

import math

import pytest
import torch

from benchmarks.gossip import overlap_link
from benchmarks.gossip.overlap_link import Training, hidden


def test_a_round_is_hidden_as_far_as_a_step_is_no_longer():
    assert hidden(alone=2.0, after=6.0, during=3.0) == 0.75
    assert math.isnan(hidden(alone=2.0, after=2.0, during=2.0))


@pytest.mark.slow
def test_a_rank_that_is_its_own_neighbor_trains_as_alone(monkeypatch):
    monkeypatch.setitem(overlap_link.SIZES, "cpu", (64, 1, 2, 4))
    found = []
    for overlap in (None, 0):
        training = Training("cpu", 256, 0.0, overlap)
        for _ in range(3):
            training.step()
        found.append([each.detach().clone() for each in training.model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert training.rounds.round_index == 3
    assert training.rounds.run.stats.wire_bytes > 3 * 4 * training.numel
