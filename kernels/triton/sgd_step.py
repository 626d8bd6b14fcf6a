"""``sgd_step_`` in Triton, for GPUs without the compiled CUDA library."""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ._floats import to_fp32
from ._register import register
from ._scalars import argument, read
from ._step import load_mixed, store_rounded, take_messages

BLOCK = 2048  # four elements per thread: eight, as elsewhere, would take too many registers
OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}


@triton.jit
def _sgd_step_block(
    streams, numbers, offsets, mask, NUM_MESSAGES: tl.constexpr, NESTEROV: tl.constexpr
):
    param, grad, momentum_buffer, messages, prediction, message = streams
    sign, decay, momentum, share, rate, ahead_rate, coefficients = numbers
    own = load_mixed(param, messages, coefficients, offsets, mask, NUM_MESSAGES)
    gradient = sign * to_fp32(tl.load(grad + offsets, mask=mask)) + read(decay) * own
    velocity = tl.zeros_like(own)
    if momentum_buffer is not None:
        velocity = to_fp32(tl.load(momentum_buffer + offsets, mask=mask))
    velocity = momentum * velocity + share * gradient
    update = gradient + momentum * velocity if NESTEROV else velocity
    own = store_rounded(own - read(rate) * update, param, offsets, mask)
    if momentum_buffer is not None:
        velocity = store_rounded(velocity, momentum_buffer, offsets, mask)
    if message is not None:
        store_rounded(own, message, offsets, mask)
    if prediction is not None:
        store_rounded(own - read(ahead_rate) * velocity, prediction, offsets, mask)


@triton.jit
def _sgd_step_kernel(
    param,
    grad,
    momentum_buffer,
    messages,
    prediction,
    message,
    sign,
    decay,
    momentum,
    share,
    rate,
    ahead_rate,
    coefficients,
    numel,
    NUM_MESSAGES: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    streams = (param, grad, momentum_buffer, messages, prediction, message)
    numbers = (sign, decay, momentum, share, rate, ahead_rate, coefficients)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = begin + tl.arange(0, BLOCK)
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _sgd_step_block(streams, numbers, offsets, None, NUM_MESSAGES, NESTEROV)
    else:
        _sgd_step_block(streams, numbers, offsets, offsets < numel, NUM_MESSAGES, NESTEROV)


def sgd_step_(
    param: Tensor,
    grad: Tensor,
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
    horizon: Tensor,
    prediction: Tensor | None,
    message: Tensor | None,
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.sgd_step_``."""
    with torch.cuda.device_of(param):
        incoming, coefficients = take_messages(param, mass, messages, masses)
        if param.numel() == 0:
            return
        rate = lr / mass
        _sgd_step_kernel[(triton.cdiv(param.numel(), BLOCK),)](
            param,
            grad,
            momentum_buffer,
            incoming,
            prediction,
            message,
            -1.0 if maximize else 1.0,
            argument(weight_decay * mass),
            momentum,
            1 - dampening,
            argument(rate),
            argument(rate * horizon),
            coefficients,
            param.numel(),
            NUM_MESSAGES=len(incoming or ()),
            NESTEROV=nesterov,
            BLOCK=BLOCK,
            **OPTIONS,
        )


register("sgd_step_", sgd_step_)
