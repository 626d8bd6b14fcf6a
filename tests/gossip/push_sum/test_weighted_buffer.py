"""z and its mass, without any messages."""

import torch

from pyparallel.gossip.push_sum.weighted_buffer import WeightedBuffer


def test_numerator_and_debiased_are_inverse():
    buffer = WeightedBuffer(torch.tensor([1.0, -3.0]))
    buffer.weight.fill_(0.5)
    buffer.to_numerator()
    assert buffer.values.tolist() == [0.5, -1.5]
    buffer.to_debiased()
    buffer.to_debiased()
    assert buffer.values.tolist() == [1.0, -3.0]


def test_portions_are_of_the_mass_and_take_none_of_it():
    buffer = WeightedBuffer(torch.zeros(3))
    buffer.weight.fill_(0.5)
    masses = buffer.outgoing_mass((0.25, 0.5))
    assert masses.dtype == torch.float64
    assert masses.tolist() == [0.125, 0.25]
    assert buffer.weight.item() == 0.5
    assert buffer.outgoing_mass(()).shape == (0,)
