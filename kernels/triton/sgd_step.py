"""``sgd_step_`` in Triton, for GPUs without the compiled CUDA library."""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ._register import register
from ._scalars import argument, read
from ._step import (
    find_nonfinite,
    grad_factor,
    load,
    mix_messages,
    settle,
    spans,
    store_rounded,
    take_messages,
)

BLOCK = 2048  # four elements per thread: eight, as elsewhere, would take too many registers
OPTIONS = {"num_warps": 16, "maxnreg": 64, "enable_fp_fusion": False}


@triton.jit
def _step(
    before, old_velocity, grad, momentum_buffer, nonfinite, numbers, offsets, mask,
    NESTEROV: tl.constexpr,
):  # fmt: skip
    factor, decay, momentum, share, rate = numbers
    scaled = read(factor) * load(grad, offsets, mask)
    gradient = scaled + read(decay) * before
    velocity = momentum * old_velocity + share * gradient
    update = gradient + momentum * velocity if NESTEROV else velocity
    own = before - read(rate) * update
    if nonfinite is not None:
        found = find_nonfinite(scaled, nonfinite, mask)
        own = tl.where(found, before, own)
        velocity = tl.where(found, old_velocity, velocity)
    if momentum_buffer is not None:
        velocity = store_rounded(velocity, momentum_buffer, offsets, mask)
    return own, velocity


@triton.jit
def _sgd_step_block(
    param, grad, momentum_buffer, mixing, outputs, numbers, ahead_rate, found_inf, offsets, mask,
    NUM_MESSAGES: tl.constexpr, MIX_AFTER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    nonfinite, prediction, message = outputs
    own = load(param, offsets, mask)
    if not MIX_AFTER:
        own = mix_messages(own, mixing, offsets, mask, NUM_MESSAGES)
    velocity = tl.zeros_like(own)
    if momentum_buffer is not None:
        velocity = load(momentum_buffer, offsets, mask)
    if grad is not None and (found_inf is None or read(found_inf) == 0):
        own, velocity = _step(
            own, velocity, grad, momentum_buffer, nonfinite, numbers, offsets, mask, NESTEROV
        )
    own = settle(own, param, mixing, message, offsets, mask, NUM_MESSAGES, MIX_AFTER)
    if prediction is not None:
        store_rounded(own - read(ahead_rate) * velocity, prediction, offsets, mask)


@triton.jit
def _sgd_step_kernel(
    param,
    grad,
    momentum_buffer,
    messages,
    nonfinite,
    prediction,
    message,
    factor,
    decay,
    momentum,
    share,
    rate,
    ahead_rate,
    found_inf,
    coefficients,
    numel,
    NUM_MESSAGES: tl.constexpr,
    MIX_AFTER: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    mixing, outputs = (messages, coefficients), (nonfinite, prediction, message)
    numbers = (factor, decay, momentum, share, rate)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = begin + tl.arange(0, BLOCK)
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _sgd_step_block(
            param, grad, momentum_buffer, mixing, outputs, numbers, ahead_rate, found_inf,
            offsets, None, NUM_MESSAGES, MIX_AFTER, NESTEROV,
        )  # fmt: skip
    else:
        _sgd_step_block(
            param, grad, momentum_buffer, mixing, outputs, numbers, ahead_rate, found_inf,
            offsets, offsets < numel, NUM_MESSAGES, MIX_AFTER, NESTEROV,
        )  # fmt: skip


def sgd_step_(
    param: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    momentum_buffer: Tensor | None,
    lr: Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    mass: Tensor,
    messages: list[Tensor],
    masses: Tensor,
    mix_after: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    nonfinite: Tensor | None,
    horizon: Tensor,
    prediction: Tensor | None,
    message: Tensor | None,
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.sgd_step_``."""
    with torch.cuda.device_of(param):
        incoming, coefficients, mass_before = take_messages(
            param, mass, messages, masses, mix_after
        )
        numbers = (
            grad_factor(maximize, grad_scale),
            argument(weight_decay * mass_before),
            momentum,
            1 - dampening,
            argument(lr / mass_before),
            argument(lr / mass * horizon),
            None if found_inf is None else argument(found_inf),
        )
        for span, grad in spans(param, grads, offsets):
            numel = span.stop - span.start
            _sgd_step_kernel[(triton.cdiv(numel, BLOCK),)](
                param[span],
                grad,
                None if momentum_buffer is None else momentum_buffer[span],
                tuple(each[span] for each in incoming) or None,
                nonfinite,
                None if prediction is None else prediction[span],
                None if message is None else message[span],
                *numbers,
                coefficients,
                numel,
                NUM_MESSAGES=len(incoming),
                MIX_AFTER=mix_after,
                NESTEROV=nesterov,
                BLOCK=BLOCK,
                **OPTIONS,
            )


register("sgd_step_", sgd_step_)
