"""Philox: the random numbers of ``pyparallel.ops._philox``, in a Triton kernel."""

import triton
import triton.language as tl


@triton.jit
def random_bits(begin, seed, offset, NUMEL: tl.constexpr):
    """Return 16 random bits (int32) per element, from ``begin`` on, a multiple of 8."""
    group = begin // 8 + tl.arange(0, NUMEL // 8)
    zeros = tl.zeros_like(group).to(tl.uint32)
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    offset_low, offset_high = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, zeros + offset_low, zeros + offset_high, n_rounds=7)
    # The last joined dimension varies fastest: the halves of a word, then the words.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (NUMEL,)).to(tl.int32)
