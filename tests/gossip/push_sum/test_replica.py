"""Both ends of an edge know the same."""

import pytest
import torch

from pyparallel.compression import BufferLayout, Cast, CorruptMessageError, Int8, TopK
from pyparallel.gossip.push_sum.replica import Replica

COMPRESSORS = [Int8(), Int8(seed=3), Cast(torch.float16), TopK(0.1)]


def make(compressor, numel=300, dtype=torch.float32):
    like = torch.empty(numel, dtype=dtype)
    return Replica(like, BufferLayout.flat(numel), compressor, rank=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_listeners_know_what_the_teller_knows_bit_for_bit(compressor, dtype):
    teller, listener = make(compressor, dtype=dtype), make(compressor, dtype=dtype)
    values = torch.randn(300).to(dtype)
    for index in range(6):
        message = teller.tell(values)
        assert index > 0 or torch.equal(teller.values, values)
        listener.hear(message)
        assert torch.equal(teller.values, listener.values)
        values = values + torch.randn(300).to(dtype)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_what_is_lost_is_told_later(compressor):
    mirror, values = make(compressor), torch.randn(300)
    mirror.tell(torch.zeros(300))
    for _ in range(11):
        mirror.tell(values)
    torch.testing.assert_close(mirror.values, values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("numel", [0, 1])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_nothing_and_a_single_number_can_be_told(compressor, numel):
    teller, listener = make(compressor, numel), make(compressor, numel)
    for value in (1.0, 3.0, -2.0):
        listener.hear(teller.tell(torch.full((numel,), value)))
    torch.testing.assert_close(listener.values, torch.full((numel,), -2.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_goes_on_bit_for_bit(compressor):
    first, second = make(compressor), make(compressor)
    for _ in range(3):
        first.tell(torch.randn(300))
    state = torch.utils._pytree.tree_map(
        lambda x: x.clone() if torch.is_tensor(x) else x, first.state_dict()
    )
    second.tell(torch.randn(300))
    second.load_state_dict(state)
    values = torch.randn(300)
    for mine, theirs in zip(first.tell(values), second.tell(values), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(first.values, second.values)


def test_a_state_from_before_the_first_message_makes_the_next_one_the_first():
    mirror = make(Int8())
    state = mirror.state_dict()
    mirror.tell(torch.randn(300))
    mirror.load_state_dict(state)
    values = torch.randn(300)
    assert torch.equal(mirror.tell(values)[0], values)


def test_a_corrupt_message_leaves_the_mirror_as_it_was():
    teller, listener = make(TopK(0.1)), make(TopK(0.1))
    listener.hear(teller.tell(torch.zeros(300)))
    values, indices = teller.tell(torch.randn(300))
    with pytest.raises(CorruptMessageError):
        listener.hear((values, indices + 300))
    assert not listener.values.any()
