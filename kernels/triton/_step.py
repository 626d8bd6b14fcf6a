"""Shared parts of the optimizer steps: messages mixed in before, results stored after."""

from torch import Tensor

import triton
import triton.language as tl

from . import mix
from ._floats import round_to, to_fp32


@triton.jit
def load_mixed(param, messages, coefficients, offsets, mask, NUM_MESSAGES: tl.constexpr):
    """Load parameters in fp32, mixed with the messages as in ``mix_``."""
    own = to_fp32(tl.load(param + offsets, mask=mask))
    if NUM_MESSAGES > 0:
        delta = tl.zeros_like(own)
        for j in tl.static_range(NUM_MESSAGES):
            message = to_fp32(tl.load(messages[j] + offsets, mask=mask))
            delta += tl.load(coefficients + j) * (message - own)
        own += delta
    return own


@triton.jit
def store_rounded(values, target, offsets, mask):
    """Store fp32 values; return them as rounded by the buffer's dtype, in fp32."""
    rounded = round_to(values, target.dtype.element_ty)
    tl.store(target + offsets, rounded, mask=mask)
    return to_fp32(rounded)


def take_messages(
    param: Tensor, mass: Tensor, messages: list[Tensor], masses: Tensor
) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
    """Add the messages' masses to the rank's own; return the launch's messages and coefficients.

    PushSum is associative: messages beyond those of one launch are mixed in here.
    """
    if not messages:
        return None, None
    first = max(0, len(messages) - mix.MAX_MESSAGES)
    mix.mix_(param, mass, messages[:first], masses[:first])
    rest = masses[first:]
    mass.copy_(sum(rest.unbind(), start=mass))
    return tuple(messages[first:]), (rest / mass).float()
