"""What the optimizer steps share: messages mixed in before, results stored after."""

from torch import Tensor

import triton
import triton.language as tl

from . import mix
from ._floats import round_to, to_fp32


@triton.jit
def load_mixed(param, messages, coefficients, offsets, mask, NUM_MESSAGES: tl.constexpr):
    """Parameters in fp32, as ``mix_`` leaves them."""
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
    """Store fp32 values; what the buffer then holds, in fp32."""
    rounded = round_to(values, target.dtype.element_ty)
    tl.store(target + offsets, rounded, mask=mask)
    return to_fp32(rounded)


def take_messages(
    param: Tensor, mass: Tensor, messages: list[Tensor], masses: Tensor
) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
    """Add the messages' masses to the own one; the messages of the launch, their coefficients.

    PushSum is associative: what is too much for one launch is mixed in here.
    """
    if not messages:
        return None, None
    first = max(0, len(messages) - mix.MAX_MESSAGES)
    mix.mix_(param, mass, messages[:first], masses[:first])
    rest = masses[first:]
    mass.copy_(sum(rest.unbind(), start=mass))
    return tuple(messages[first:]), (rest / mass).float()
