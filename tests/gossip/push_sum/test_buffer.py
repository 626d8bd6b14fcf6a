"""RoundBuffer: averaging with received messages, and the push-sum weight."""

import pytest
import torch

from pyparallel.comm import PeerError
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.push_sum.dense_buffer import DenseBuffer
from pyparallel.gossip.topology import Ring
from tests.local_transport import LocalRun
from tests.ops.op_counter import OpCounter


def delivered(values):
    """Return a buffer with one received message, all fours, of mass 1."""
    buffer = DenseBuffer(values, NeighborExchange(LocalRun(0, 1)))
    message = {"messages": [torch.full_like(values, 4.0)], "masses": torch.ones(1).double()}
    buffer.load_state_dict({"weight": torch.ones(()), "in_flight": message})
    return buffer


def test_a_round_is_merged_once():
    buffer = delivered(torch.zeros(2))
    buffer.merge()
    buffer.merge()
    assert buffer.values.tolist() == [2.0, 2.0]
    assert buffer.weight == 2


def test_outgoing_mass_is_a_share_of_the_weight_and_does_not_change_it():
    buffer = delivered(torch.zeros(3))
    buffer.weight.fill_(0.5)
    with OpCounter("mul", "mul_", "fill_", "copy_") as counter:
        masses = buffer.outgoing_mass((0.25, 0.5))
    assert counter.calls["mul"] == sum(counter.calls.values()) == 1  # one kernel on a GPU
    assert masses.dtype == torch.float64
    assert masses.tolist() == [0.125, 0.25]
    assert buffer.weight.item() == 0.5
    assert buffer.outgoing_mass(()).shape == (0,)


class FailingExchange(NeighborExchange):
    """An exchange whose messages are never delivered."""

    def start(self, sends, receives):
        return self

    def wait(self, kind=None):
        raise PeerError("a neighbor failed")


def test_the_mass_of_a_failed_round_comes_back():
    buffer = DenseBuffer(torch.tensor([1.0, -3.0]), FailingExchange(LocalRun(0, 4)))
    buffer.send(Ring(4).neighbors(0, 0), 0)
    assert buffer.weight.item() == pytest.approx(1 / 3)
    with pytest.raises(PeerError):
        buffer.merge()
    assert buffer.weight.item() == pytest.approx(1)
    assert buffer.values.tolist() == [1.0, -3.0]
    assert not buffer.in_flight
