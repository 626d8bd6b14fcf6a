"""Shared parts of the optimizer steps: gradients' ranges, mixing, and what is stored after."""

from collections.abc import Iterator

from torch import Tensor

import triton
import triton.language as tl

from . import mix
from ._floats import round_to, to_fp32
from ._scalars import argument


@triton.jit
def load(source, offsets, mask):
    """Load a buffer's entries in fp32."""
    return to_fp32(tl.load(source + offsets, mask=mask))


@triton.jit
def mix_messages(own, mixing, offsets, mask, NUM_MESSAGES: tl.constexpr):
    """Return parameters mixed with messages and their coefficients as in ``mix_``."""
    if NUM_MESSAGES > 0:
        messages, coefficients = mixing
        delta = tl.zeros_like(own)
        for j in tl.static_range(NUM_MESSAGES):
            message = load(messages[j], offsets, mask)
            delta += tl.load(coefficients + j) * (message - own)
        own += delta
    return own


@triton.jit
def store_rounded(values, target, offsets, mask):
    """Store fp32 values; return them as rounded by the buffer's dtype, in fp32."""
    rounded = round_to(values, target.dtype.element_ty)
    tl.store(target + offsets, rounded, mask=mask)
    return to_fp32(rounded)


@triton.jit
def settle(
    own, param, mixing, message, offsets, mask,
    NUM_MESSAGES: tl.constexpr, MIX_AFTER: tl.constexpr,
):  # fmt: skip
    """Store the stepped values and the next message; return the parameters as rounded."""
    if MIX_AFTER:
        if message is not None:
            store_rounded(own, message, offsets, mask)
        own = mix_messages(own, mixing, offsets, mask, NUM_MESSAGES)
    own = store_rounded(own, param, offsets, mask)
    if message is not None and not MIX_AFTER:
        store_rounded(own, message, offsets, mask)
    return own


@triton.jit
def find_nonfinite(gradient, nonfinite, mask):
    """Return which gradients are not finite, and add their number to a counter."""
    found = (tl.abs(gradient) < float("inf")) == 0  # of NaN too
    if mask is not None:
        found = found & mask
    # One by one, and rarely: a sum over the block would take too many registers.
    tl.atomic_add(nonfinite + tl.zeros_like(gradient).to(tl.int32), 1.0, mask=found)
    return found


def take_messages(
    param: Tensor, mass: Tensor, messages: list[Tensor], masses: Tensor, mix_after: bool
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor]:
    """Add the messages' masses to the rank's own.

    PushSum is associative: messages beyond those of one launch are mixed in here, unless the step
    comes first.

    Returns:
        The launches' messages, their coefficients, and the mass with which the rank steps.
    """
    before = mass.clone() if mix_after else mass
    if not messages:
        return (), None, before
    first = 0 if mix_after else max(0, len(messages) - mix.MAX_MESSAGES)
    mix.mix_(param, mass, messages[:first], masses[:first])
    rest = masses[first:]
    mass.copy_(sum(rest.unbind(), start=mass))
    return tuple(messages[first:]), (rest / mass).float(), before


def spans(
    param: Tensor, grads: list[Tensor], offsets: list[int]
) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield the ranges of the buffers with one gradient or none, in order: each has a launch."""
    end = 0
    for grad, begin in zip(grads, offsets, strict=True):
        if grad.numel() == 0:
            continue
        if begin > end:
            yield slice(end, begin), None
        end = begin + grad.numel()
        yield slice(begin, end), grad
    if end < param.numel():
        yield slice(end, param.numel()), None


def grad_factor(maximize: bool, grad_scale: Tensor | None) -> float | Tensor:
    """Return what gradients are multiplied by, as a kernel argument."""
    sign = -1.0 if maximize else 1.0
    return sign if grad_scale is None else argument(sign * (1 / grad_scale.double()))
