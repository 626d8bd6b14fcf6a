"""Philox: random numbers as a function of a seed, an offset and an element's index.

Philox-4x32 with seven rounds (Salmon et al., SC 2011). It is stateless, so all implementations and
devices agree bit for bit, in whatever order they process the elements.
"""

import torch
from torch import Tensor

from ._checks import describe

_LOW = 0xFFFFFFFF
_MULTIPLIER0, _MULTIPLIER1 = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, seed: int, rounds: int = 7) -> Words:
    """Return four random words of 32 bits (in int64) for each counter of four words."""
    c0, c1, c2, c3 = counter
    key = [seed & _LOW, seed >> 32 & _LOW]
    for _ in range(rounds):
        high0, low0 = _multiply(_MULTIPLIER0, c0)
        high1, low1 = _multiply(_MULTIPLIER1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0
        key = [(word + step) & _LOW for word, step in zip(key, _KEY_STEPS, strict=True)]
    return c0, c1, c2, c3


def random_bits(numel: int, seed: int, offset: Tensor, device: torch.device) -> Tensor:
    """Return (numel,) int64: 16 random bits for each element of a buffer.

    Eight neighbors share a counter: its low two words are their index divided by eight, its high
    two the offset; the key is the seed. Each uses half a word, the lower half first.
    """
    group = torch.arange((numel + 7) // 8, dtype=torch.int64, device=device)
    high = (offset + torch.zeros_like(group)).to(torch.int64)
    words = torch.stack(philox((group & _LOW, group >> 32, high & _LOW, high >> 32), seed), dim=1)
    return torch.stack((words & 0xFFFF, words >> 16), dim=2).flatten()[:numel]


def as_seed(seed: int | None) -> int | None:
    """Return the seed, in [0, 2**64), as an int64 with the same bits, the schemas' type."""
    if seed is None:
        return None
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    return seed - 2**64 if seed >= 2**63 else seed


def as_offset(offset: int | Tensor, model: Tensor) -> Tensor:
    """Return a 0-d int64 tensor; one on the model's device stays there and is not read."""
    if not isinstance(offset, Tensor):
        if not isinstance(offset, int) or not 0 <= offset < 2**63:
            raise ValueError(f"offset must be an integer in [0, 2**63), got {offset!r}")
        return torch.scalar_tensor(offset, dtype=torch.int64, device="cpu")
    fits = offset.dtype == torch.int64 and offset.dim() == 0
    if not (fits and (offset.is_cpu or offset.device == model.device)):
        raise ValueError(
            "offset must be a number, or a 0-d int64 tensor on the cpu or the buffer's device, "
            f"got {describe(offset)}"
        )
    return offset


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low half of a 64-bit product, without leaving int64's positive range."""
    low, high = constant * (word & 0xFFFF), constant * (word >> 16)
    return ((low >> 16) + high) >> 16, (low + ((high & 0xFFFF) << 16)) & _LOW
