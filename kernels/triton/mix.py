"""``mix_`` in Triton, for GPUs without the compiled CUDA library."""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ._floats import round_to
from ._register import register

MAX_MESSAGES = 16  # per launch: each number is compiled separately
BLOCK = 4096
# No fused multiply-add: the op rounds after every operation, as in C++ and the reference.
OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}


@triton.jit
def nothing(own):
    """Return what added to any value does not change it: -0.0, which 0 would change."""
    return tl.zeros_like(own) * -1.0


@triton.jit
def add_message(delta, own, message, coefficient):
    """Add a message's part to the sum of ``mix_``; none if its coefficient is 0."""
    if coefficient != 0:  # a branch of all threads: a choice per element takes more registers
        delta += coefficient * (message - own)
    return delta


@triton.jit
def _mix_block(z, messages, offsets, mask, coefficients, NUM_MESSAGES: tl.constexpr):
    own = tl.load(z + offsets, mask=mask).to(tl.float32)
    delta = nothing(own)
    for j in tl.static_range(NUM_MESSAGES):
        message = tl.load(messages[j] + offsets, mask=mask).to(tl.float32)
        delta = add_message(delta, own, message, coefficients[j])
    tl.store(z + offsets, round_to(own + delta, z.dtype.element_ty), mask=mask)


@triton.jit
def _mix_kernel(
    z, weight, messages, masses, numel, NUM_MESSAGES: tl.constexpr, BLOCK: tl.constexpr
):
    total = tl.load(weight)
    for j in tl.static_range(NUM_MESSAGES):
        total += tl.load(masses + j)
    coefficients = ()
    for j in tl.static_range(NUM_MESSAGES):
        coefficients = coefficients + ((tl.load(masses + j) / total).to(tl.float32),)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = begin + tl.arange(0, BLOCK)
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _mix_block(z, messages, offsets, None, coefficients, NUM_MESSAGES)
    else:
        _mix_block(z, messages, offsets, offsets < numel, coefficients, NUM_MESSAGES)


# A separate launch: every program of _mix_kernel reads the old weight.
@triton.jit
def _add_masses_kernel(weight, masses, NUM_MESSAGES: tl.constexpr):
    total = tl.load(weight)
    for j in tl.static_range(NUM_MESSAGES):
        total += tl.load(masses + j)
    tl.store(weight, total)


def mix_(z: Tensor, weight: Tensor, messages: list[Tensor], masses: Tensor) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.mix_``."""
    with torch.cuda.device_of(z):
        _mix_in_groups(z, weight, messages, masses)


def _mix_in_groups(z: Tensor, weight: Tensor, messages: list[Tensor], masses: Tensor) -> None:
    # PushSum is associative: mixing in groups gives the average of all.
    for first in range(0, len(messages), MAX_MESSAGES):
        group = tuple(messages[first : first + MAX_MESSAGES])
        group_masses = masses[first : first + MAX_MESSAGES]
        if z.numel() > 0:
            grid = (triton.cdiv(z.numel(), BLOCK),)
            _mix_kernel[grid](
                z,
                weight,
                group,
                group_masses,
                z.numel(),
                NUM_MESSAGES=len(group),
                BLOCK=BLOCK,
                **OPTIONS,
            )
        _add_masses_kernel[(1,)](weight, group_masses, NUM_MESSAGES=len(group))


register("mix_", mix_)
