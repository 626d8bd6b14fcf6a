"""``adamw_step_`` in Triton, for GPUs without the compiled CUDA library."""

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
def _ahead(own, mean, square, step_size, eps):
    # Correctly rounded (IEEE): Triton's plain operators are approximate.
    return own - tl.div_rn(step_size * mean, tl.sqrt_rn(square) + eps)


@triton.jit
def _adamw_step_block(
    streams, numbers, offsets, mask, NUM_MESSAGES: tl.constexpr, FROM_AVERAGE: tl.constexpr
):
    param, grad, exp_avg, exp_avg_sq, messages, prediction, message = streams
    decay, sign, pull, beta2, share, eps, step_size, ahead_size, coefficients = numbers
    own = load_mixed(param, messages, coefficients, offsets, mask, NUM_MESSAGES)
    gradient = sign * to_fp32(tl.load(grad + offsets, mask=mask))
    mean = to_fp32(tl.load(exp_avg + offsets, mask=mask))
    square = to_fp32(tl.load(exp_avg_sq + offsets, mask=mask))
    base = mean if FROM_AVERAGE else gradient
    mean = base + pull * (gradient - mean)
    square = beta2 * square + share * gradient * gradient
    own = _ahead(own * read(decay), mean, square, read(step_size), read(eps))
    mean = store_rounded(mean, exp_avg, offsets, mask)
    square = store_rounded(square, exp_avg_sq, offsets, mask)
    own = store_rounded(own, param, offsets, mask)
    if message is not None:
        store_rounded(own, message, offsets, mask)
    if prediction is not None:
        ahead = _ahead(own, mean, square, read(ahead_size), read(eps))
        store_rounded(ahead, prediction, offsets, mask)


@triton.jit
def _adamw_step_kernel(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    messages,
    prediction,
    message,
    decay,
    sign,
    pull,
    beta2,
    share,
    eps,
    step_size,
    ahead_size,
    coefficients,
    numel,
    NUM_MESSAGES: tl.constexpr,
    FROM_AVERAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    streams = (param, grad, exp_avg, exp_avg_sq, messages, prediction, message)
    numbers = (decay, sign, pull, beta2, share, eps, step_size, ahead_size, coefficients)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = begin + tl.arange(0, BLOCK)
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _adamw_step_block(streams, numbers, offsets, None, NUM_MESSAGES, FROM_AVERAGE)
    else:
        mask = offsets < numel
        _adamw_step_block(streams, numbers, offsets, mask, NUM_MESSAGES, FROM_AVERAGE)


def adamw_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    maximize: bool,
    mass: Tensor,
    messages: list[Tensor],
    masses: Tensor,
    horizon: Tensor,
    prediction: Tensor | None,
    message: Tensor | None,
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.adamw_step_``."""
    with torch.cuda.device_of(param):
        incoming, coefficients = take_messages(param, mass, messages, masses)
        if param.numel() == 0:
            return
        correction = (1 - beta2**step).sqrt()
        rate = lr / mass
        step_size = rate / (1 - beta1**step) * correction
        ahead_size = rate * horizon / (1 - beta1**step) * correction
        from_average = 1 - beta1 < 0.5
        _adamw_step_kernel[(triton.cdiv(param.numel(), BLOCK),)](
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            incoming,
            prediction,
            message,
            argument(1 - lr * weight_decay),
            -1.0 if maximize else 1.0,
            1 - beta1 if from_average else -beta1,
            beta2,
            1 - beta2,
            argument(eps * correction),
            argument(step_size),
            argument(ahead_size),
            coefficients,
            param.numel(),
            NUM_MESSAGES=len(incoming or ()),
            FROM_AVERAGE=from_average,
            BLOCK=BLOCK,
            **OPTIONS,
        )


register("adamw_step_", adamw_step_)
