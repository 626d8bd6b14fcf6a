"""RoundBuffer: averaging with received messages, and the push-sum weight."""

import torch

from pyparallel.gossip.push_sum.buffer import RoundBuffer


class Delivered(RoundBuffer):
    """A buffer with one received message of mass 1."""

    def __init__(self, values):
        super().__init__(values)
        self.in_flight = True
        self._received_masses = torch.ones(1, dtype=torch.float64)

    def wait(self):
        pass

    @property
    def _messages(self):
        return (torch.full((2,), 4.0),)


def test_as_merged_changes_nothing():
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


def test_numerator_and_debiased_are_inverse():
    buffer = Delivered(torch.tensor([1.0, -3.0]))
    buffer.weight.fill_(0.5)
    buffer.to_numerator()
    assert buffer.values.tolist() == [0.5, -1.5]
    buffer.to_debiased()
    buffer.to_debiased()
    assert buffer.values.tolist() == [1.0, -3.0]


def test_outgoing_mass_is_a_share_of_the_weight_and_does_not_change_it():
    buffer = Delivered(torch.zeros(3))
    buffer.weight.fill_(0.5)
    masses = buffer.outgoing_mass((0.25, 0.5))
    assert masses.dtype == torch.float64
    assert masses.tolist() == [0.125, 0.25]
    assert buffer.weight.item() == 0.5
    assert buffer.outgoing_mass(()).shape == (0,)
