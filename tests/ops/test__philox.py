"""Philox: the published test vectors, and the layout shared by all implementations."""

import torch

from pyparallel.ops._philox import philox, random_bits

ONES = "ffffffff ffffffff ffffffff ffffffff"
PI = "243f6a88 85a308d3 13198a2e 03707344"
# rounds, counter, key, result: from the kat_vectors of Random123.
KNOWN = [
    (7, "0 0 0 0", 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, ONES, 2**64 - 1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, PI, 0x299F31D0A4093822, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "0 0 0 0", 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, ONES, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI, 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


def test_published_vectors():
    for rounds, counter, key, expected in KNOWN:
        assert philox(words(counter), key, rounds) == words(expected), f"{rounds} of {counter}"


def test_elements_use_their_half_of_their_word():
    seed, element = 2**63 + 11, 8 * 5 + 3
    for offset in (0, 1, 2**32 + 5):
        counter = (5, 0, offset & 0xFFFFFFFF, offset >> 32)
        whole = philox(tuple(torch.tensor([part]) for part in counter), seed)
        bits = random_bits(50, seed, torch.tensor(offset), torch.device("cpu"))
        assert bits.shape == (50,)
        assert bits[element] == whole[1] >> 16, f"{offset}"  # the upper half of word 1
        assert bits[element - 1] == whole[1] & 0xFFFF, f"{offset}"
