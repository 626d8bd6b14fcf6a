"""Replicas are bitwise equal at both ends of an edge, and ranks keep the right ones."""

import pytest
import torch

from pyparallel.compression import BufferLayout, Cast, Int8, Piece, Sign, Statistical, Ternary, TopK
from pyparallel.gossip.push_sum.replicas import Replica, Replicas

COMPRESSORS = [Int8(), Int8(seed=3), Cast(torch.float16), TopK(0.1)]
NO_MASS = torch.zeros((), dtype=torch.float64)  # is sent: the values stay as they are


def make_replica(compressor, numel=300, dtype=torch.float32):
    like = torch.empty(numel, dtype=dtype)
    return Replica(like, BufferLayout.flat(numel), compressor, rank=2)


every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)


@every_compressor
def test_empty_buffers_and_single_elements(compressor):
    for numel in (0, 1):
        sender, receiver = make_replica(compressor, numel), make_replica(compressor, numel)
        for value in (1.0, 3.0, -2.0):
            receiver.apply(sender.encode_(torch.full((numel,), value), NO_MASS))
        torch.testing.assert_close(receiver.values, torch.full((numel,), -2.0), rtol=1e-2, atol=0)


def test_after_loading_an_empty_state_the_next_message_is_uncompressed():
    replica = make_replica(Int8())
    state = replica.state_dict()
    replica.encode_(torch.randn(300), NO_MASS)
    replica.load_state_dict(state)
    values = torch.randn(300)
    assert torch.equal(replica.encode_(values, NO_MASS)[0], values)


def make_replicas():
    return Replicas(torch.zeros(300), BufferLayout.flat(300), Int8(), rank=1)


def test_receivers_of_the_same_messages_share_a_replica():
    replicas = make_replicas()
    assert replicas.of(1, (0, 2)) is replicas.of(1, (0, 2))
    assert len({id(replicas.of(*key)) for key in [(1, (0, 2)), (1, (0,)), (2, (0, 2))]}) == 3


def test_the_first_message_is_allocated_uncompressed_and_later_ones_compressed():
    replicas = make_replicas()
    replica = replicas.of(2, (1,))
    (values,) = replicas.allocate_message(replica)
    assert (values.shape, values.dtype) == ((300,), torch.float32)
    replica.apply((torch.ones(300),))
    codes, scales = replicas.allocate_message(replica)
    assert (codes.shape, scales.shape) == ((300,), (2,))
    replicas.reset()
    assert replicas.of(2, (1,)).values is None


class Growing(Int8):
    """Messages grow by one element each time."""

    def compress(self, x, state, residual=None):
        codes, scales = super().compress(x, state, residual)
        return codes, torch.cat([scales, scales.new_zeros(state.step - 1)])

    def decompress(self, message, layout, out, *, accumulate=False):
        codes, scales = message
        return super().decompress((codes, scales[:2]), layout, out, accumulate=accumulate)


def test_messages_of_other_lengths_are_not_sent():
    replicas = Replicas(torch.zeros(300), BufferLayout.flat(300), Growing(), rank=1)
    for _ in range(2):
        replicas.encode_((0,), torch.ones(300), NO_MASS)
    with pytest.raises(ValueError, match=r"of one length, got \[300, 3\] .* after \[300, 2\]"):
        replicas.encode_((0,), torch.ones(300), NO_MASS)


def test_nothing_is_written_between_parameters():
    """Codecs of signs decode no zero, also not where both ends have none."""
    pieces = (Piece("a", (40,)), Piece("gap 40 to 64 of buffer 0", (24,)), Piece("b", (64,)))
    layout = BufferLayout(pieces)
    values = torch.randn(128)
    values[40:64] = 0
    for compressor in (Sign(64), Statistical(4, 64), Ternary(block_size=64)):
        own, theirs = (Replica(values, layout, compressor, 0) for _ in range(2))
        sent = values.clone()
        for _ in range(3):
            sent += torch.where(values == 0, 0.0, 0.1)
            theirs.apply(own.encode_(sent, torch.tensor(0.5, dtype=torch.float64)))
            assert torch.equal(own.values, theirs.values)
            assert not theirs.values[40:64].any(), compressor
            assert not sent[40:64].any(), compressor
