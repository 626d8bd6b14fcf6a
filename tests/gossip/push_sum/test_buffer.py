"""Averaging with what a round has brought, whatever its messages are."""

import torch

from pyparallel.gossip.push_sum.buffer import RoundBuffer


class Delivered(RoundBuffer):
    """One message of mass 1, here already."""

    def __init__(self, values):
        super().__init__(values)
        self.in_flight = True
        self._received_masses = torch.ones(1, dtype=torch.float64)

    def arrive(self):
        pass

    @property
    def _messages(self):
        return (torch.full((2,), 4.0),)


def test_looking_at_the_average_changes_nothing():
    buffer = Delivered(torch.zeros(2))
    values, weight = buffer.as_merged()
    assert values.tolist() == [2.0, 2.0]
    assert weight == 2
    assert buffer.values.tolist() == [0.0, 0.0]
    assert buffer.weight == 1
    assert buffer.in_flight


def test_a_round_is_merged_once():
    buffer = Delivered(torch.zeros(2))
    buffer.merge()
    buffer.merge()
    assert buffer.values.tolist() == [2.0, 2.0]
    assert buffer.weight == 2
