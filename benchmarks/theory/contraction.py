"""How much of a buffer a message keeps at least: delta in the theory of error feedback."""

import math
from functools import singledispatch

import torch

from pyparallel import compression
from pyparallel.compression.sparsifiers.top_k import count_of

CPU = torch.device("cpu")
_DIGITS = {"e4m3": 4, "e5m2": 3}


@singledispatch
def contraction(
    compressor: compression.Compressor, layout: compression.BufferLayout
) -> float | None:
    """Return delta in (0, 1] with ``E |x - C(x)|^2 <= (1 - delta) |x|^2`` for all x, or None.

    If messages differ with and without a residual, delta is for those with one.
    """
    return None


@contraction.register
def _(compressor: compression.Cast, layout: compression.BufferLayout) -> float | None:
    """Return that of bfloat16, whose relative error is at most 2**-9; float16 underflows: None."""
    return 1 - 2.0**-16 if compressor.dtype == torch.bfloat16 else None


@contraction.register
def _(compressor: compression.Natural, layout: compression.BufferLayout) -> float | None:
    """Return 7/8, for entries from 2**-80, below which squares underflow, to 2**44."""
    return 7 / 8


@contraction.register
def _(compressor: compression.Ternary, layout: compression.BufferLayout) -> float | None:
    """Return 2 / (1 + sqrt(n)) for blocks of n entries, with a residual.

    The best scale saves ``(sum of drawn magnitudes)**2 / count``, a convex function of the two, so
    at least that of their means: ``|x|_2**4 / (max|x| |x|_1)``, which is smallest if all but one
    entry are ``1 / (1 + sqrt(n))`` of the largest.
    """
    return 2 / (1 + math.sqrt(max(1, min(compressor.block_size, layout.numel))))


@contraction.register
def _(compressor: compression.Sign, layout: compression.BufferLayout) -> float | None:
    """Return 1 / n for blocks of n entries, the worst case: all but one entry are 0.

    The exact value for a block is ``|x|_1**2 / (n |x|_2**2)``: 2 / pi for normally distributed
    entries. A block whose mean magnitude is below 2**-100 is sent as 0: its squares underflow
    float32.
    """
    return 1 / max(1, min(compressor.block_size, layout.numel))


@contraction.register(compression.Int8)
@contraction.register(compression.Int4)
@contraction.register(compression.QSGD)
def _(
    compressor: compression.Int8 | compression.Int4 | compression.QSGD,
    layout: compression.BufferLayout,
) -> float | None:
    """Return delta for blocks of n entries and integers to L, with m = (n - 1) / (2 L)**2.

    The largest entry is exact. Rounded to nearest, another entry errs by at most half a level and
    by no more than its magnitude, so in the worst case all others lie at half a level: 1 / (1 + m).
    With stochastic rounding, the expected square is at most a quarter: 1 - m, if that is positive.

    A block whose magnitudes are all below 2**-100 is sent as 0: its squares underflow float32.
    """
    largest = (1 << compressor.bits - 1) - 1
    neighbors = max(0, min(layout.numel, compressor.block_size) - 1)
    loss = neighbors / (2 * largest) ** 2
    if compressor.unbiased:
        return 1 - loss if loss < 1 else None
    return 1 / (1 + loss)


@contraction.register
def _(compressor: compression.Fp8, layout: compression.BufferLayout) -> float | None:
    """Return delta for d significant bits: the relative error is at most 2**-d.

    Twice its square leaves room for the smaller entries of a block, which have fewer digits. A
    block whose magnitudes are all below 2**-100 is sent as 0: its squares underflow float32.
    """
    return 1 - 2 * 4.0 ** -_DIGITS[compressor.format]


@contraction.register(compression.TopK)
@contraction.register(compression.RandomK)
def _(
    compressor: compression.TopK | compression.RandomK, layout: compression.BufferLayout
) -> float | None:
    """Return the fraction of entries sent; by `RandomK` with a residual."""
    return count_of(compressor.density, layout.numel) / max(1, layout.numel)


@contraction.register
def _(compressor: compression.PermK, layout: compression.BufferLayout) -> float | None:
    """Return 1 / num_ranks, with a residual; None if num_ranks is None."""
    return None if compressor.num_ranks is None else 1 / compressor.num_ranks


@contraction.register
def _(compressor: compression.PowerSGD, layout: compression.BufferLayout) -> float | None:
    """Return 1 if nothing is compressed, else None: M may be orthogonal to the span of Q."""
    return None if compressor.init(layout, CPU).pieces else 1.0


@contraction.register
def _(compressor: compression.Chain, layout: compression.BufferLayout) -> float | None:
    """Return the product: the second's error is orthogonal to that of the first."""
    kept = contraction(compressor.first, layout)
    if kept is None:
        return None
    of_values = contraction(
        compressor.second, compression.BufferLayout.flat(round(kept * layout.numel))
    )
    return None if of_values is None else kept * of_values


@contraction.register
def _(compressor: compression.PerParameter, layout: compression.BufferLayout) -> float | None:
    """Return the smallest of the patterns that match a parameter, or None if any is None."""
    states = compressor.init(layout, CPU).inner
    pairs = zip(compressor.compressors, states, strict=True)
    return _least([contraction(c, s.layout) for (_, c), s in pairs if s.layout.numel])


@contraction.register
def _(compressor: compression.Switch, layout: compression.BufferLayout) -> float | None:
    """Return the smallest of all, or None if any is None."""
    return _least([contraction(each, layout) for _, each in compressor.compressors])


def _least(found: list[float | None]) -> float | None:
    known = [each for each in found if each is not None]
    return min(known, default=1.0) if len(known) == len(found) else None
