"""Which mirrors a rank keeps."""

import pytest
import torch

from pyparallel.compression import BufferLayout, Int8
from pyparallel.gossip.push_sum.replicas import Replicas


def make():
    return Replicas(torch.zeros(300), BufferLayout.flat(300), Int8(), rank=1)


def test_who_is_told_together_shares_a_mirror():
    mirrors = make()
    assert mirrors.of(1, (0, 2)) is mirrors.of(1, (0, 2))
    assert len({id(mirrors.of(*key)) for key in [(1, (0, 2)), (1, (0,)), (2, (0, 2))]}) == 3


def test_room_is_for_the_values_at_first_and_for_a_message_then():
    mirrors = make()
    mirror = mirrors.of(2, (1,))
    (room,) = mirrors.room_for(mirror)
    assert (room.shape, room.dtype) == ((300,), torch.float32)
    mirror.hear((torch.ones(300),))
    codes, scales = mirrors.room_for(mirror)
    assert (codes.shape, scales.shape) == ((300,), (2,))
    mirrors.forget()
    assert mirrors.of(2, (1,)).values is None


class Growing(Int8):
    """Says one number more each time."""

    def compress(self, x, state, residual=None):
        codes, scales = super().compress(x, state, residual)
        return codes, torch.cat([scales, scales.new_zeros(state.step - 1)])

    def decompress(self, message, layout, out, *, accumulate=False):
        codes, scales = message
        return super().decompress((codes, scales[:2]), layout, out, accumulate=accumulate)


def test_messages_of_other_lengths_never_leave():
    mirrors = Replicas(torch.zeros(300), BufferLayout.flat(300), Growing(), rank=1)
    for _ in range(2):
        mirrors.tell((0,), torch.ones(300))
    with pytest.raises(ValueError, match=r"of one length, got \[300, 3\] .* after \[300, 2\]"):
        mirrors.tell((0,), torch.ones(300))


def test_all_of_them_are_saved():
    mirrors, others = make(), make()
    mirrors.of(1, (0, 2)).tell(torch.ones(300))
    mirrors.of(2, (1,)).hear((torch.ones(300) * 2,))
    others.of(0, (1,)).hear((torch.ones(300) * 3,))
    others.load_state_dict(mirrors.state_dict())
    assert others.of(1, (0, 2)).values.tolist() == [1] * 300
    assert others.of(2, (1,)).values.tolist() == [2] * 300
    assert others.of(0, (1,)).values is None
