"""``adamw_step_`` in Triton, for GPUs without the compiled CUDA library."""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ._register import register
from ._scalars import argument, read
from ._step import (
    BLOCK,
    OPTIONS,
    PART,
    count_nonfinite,
    find_grads,
    find_rows,
    grad_factor,
    grad_table,
    load,
    load_grad,
    load_grads,
    mix_messages,
    settle,
    store_rounded,
    take_messages,
)


@triton.jit
def _ahead(own, mean, square, step_size, eps):
    # Correctly rounded (IEEE): Triton's plain operators are approximate.
    return own - tl.div_rn(step_size * mean, tl.sqrt_rn(square) + eps)


@triton.jit
def _step(
    values, gradient, states, nonfinite, numbers, offsets, stepped,
    FROM_AVERAGE: tl.constexpr, DECOUPLED: tl.constexpr,
):  # fmt: skip
    before, old_mean, old_square = values
    exp_avg, exp_avg_sq = states
    factor, decay, pull, beta2, share, eps, step_size = numbers
    scaled = read(factor) * gradient
    decayed, gradient = before, scaled
    if DECOUPLED:
        decayed = before * read(decay)
    else:
        gradient = scaled + read(decay) * before
    base = old_mean if FROM_AVERAGE else gradient
    mean = base + pull * (gradient - old_mean)
    square = beta2 * old_square + share * gradient * gradient
    stored = stepped
    if nonfinite is not None:
        stepped = count_nonfinite(scaled, nonfinite, stepped)
    if stepped is not None:
        mean = tl.where(stepped, mean, old_mean)
        square = tl.where(stepped, square, old_square)
    own = _ahead(decayed, mean, square, read(step_size), read(eps))
    if stepped is not None:
        own = tl.where(stepped, own, before)
    mean = store_rounded(mean, exp_avg, offsets, stored)
    square = store_rounded(square, exp_avg_sq, offsets, stored)
    return own, mean, square


@triton.jit
def _adamw_step_block(
    param, gradient, has, stepped, states, mixing, outputs, numbers, ahead_size, found_inf,
    offsets, mask,
    NUM_MESSAGES: tl.constexpr, MIX_AFTER: tl.constexpr,
    FROM_AVERAGE: tl.constexpr, DECOUPLED: tl.constexpr,
):  # fmt: skip
    exp_avg, exp_avg_sq = states
    nonfinite, prediction, message = outputs
    own = load(param, offsets, mask)
    if not MIX_AFTER:
        own = mix_messages(own, mixing, offsets, mask, NUM_MESSAGES)
    mean = load(exp_avg, offsets, mask)
    square = load(exp_avg_sq, offsets, mask)
    if has and (found_inf is None or read(found_inf) == 0):
        own, mean, square = _step(
            (own, mean, square), gradient, states, nonfinite, numbers, offsets, stepped,
            FROM_AVERAGE, DECOUPLED,
        )  # fmt: skip
    own = settle(own, param, mixing, message, offsets, mask, NUM_MESSAGES, MIX_AFTER)
    if prediction is not None:
        ahead = _ahead(own, mean, square, read(ahead_size), read(numbers[5]))
        store_rounded(ahead, prediction, offsets, mask)


@triton.jit
def _adamw_step_kernel(
    param,
    grad,
    table,
    num_rows,
    exp_avg,
    exp_avg_sq,
    messages,
    nonfinite,
    prediction,
    message,
    factor,
    decay,
    pull,
    beta2,
    share,
    eps,
    step_size,
    ahead_size,
    found_inf,
    coefficients,
    numel,
    NUM_MESSAGES: tl.constexpr,
    MIX_AFTER: tl.constexpr,
    FROM_AVERAGE: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    states, mixing = (exp_avg, exp_avg_sq), (messages, coefficients)
    outputs = (nonfinite, prediction, message)
    numbers = (factor, decay, pull, beta2, share, eps, step_size)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    row = find_rows(table, num_rows, begin)
    # Only unmasked accesses become 16 bytes wide, so full blocks of one row have their own branch.
    if tl.load(row + 2) >= begin + BLOCK:
        offsets = begin + tl.arange(0, BLOCK)
        address = find_grads(row, grad, begin)
        _adamw_step_block(
            param, load_grad(address, grad, BLOCK), address != 0, None, states, mixing, outputs,
            numbers, ahead_size, found_inf, offsets, None,
            NUM_MESSAGES, MIX_AFTER, FROM_AVERAGE, DECOUPLED,
        )  # fmt: skip
    else:
        for first in range(begin, tl.minimum(begin + BLOCK, numel), PART):
            offsets = first + tl.arange(0, PART)
            addresses = find_grads(find_rows(table, num_rows, offsets), grad, offsets)
            _adamw_step_block(
                param, load_grads(addresses, grad), True, addresses != 0, states, mixing, outputs,
                numbers, ahead_size, found_inf, offsets, offsets < numel,
                NUM_MESSAGES, MIX_AFTER, FROM_AVERAGE, DECOUPLED,
            )  # fmt: skip


def adamw_step_(
    param: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    decoupled: bool,
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
    """Launch the kernel with arguments checked by ``pyparallel.ops.adamw_step_``."""
    with torch.cuda.device_of(param):
        incoming, coefficients, mass_before = take_messages(
            param, mass, messages, masses, mix_after
        )
        if found_inf is not None:  # then only the prediction uses it: of the step before
            step = (step - (found_inf != 0).double()).clamp(min=1)
        correction = (1 - beta2**step).sqrt()
        step_size = lr / mass_before / (1 - beta1**step) * correction
        ahead_size = lr / mass * horizon / (1 - beta1**step) * correction
        from_average = 1 - beta1 < 0.5
        decay = 1 - lr * weight_decay if decoupled else weight_decay * mass_before
        numbers = (
            grad_factor(maximize, grad_scale),
            argument(decay),
            1 - beta1 if from_average else -beta1,
            beta2,
            1 - beta2,
            argument(eps * correction),
            argument(step_size),
            argument(ahead_size),
            None if found_inf is None else argument(found_inf),
        )
        if param.numel() == 0:
            return
        _adamw_step_kernel[(triton.cdiv(param.numel(), BLOCK),)](
            param,
            *grad_table(param, grads, offsets),
            exp_avg,
            exp_avg_sq,
            incoming or None,
            nonfinite,
            prediction,
            message,
            *numbers,
            coefficients,
            param.numel(),
            NUM_MESSAGES=len(incoming),
            MIX_AFTER=mix_after,
            FROM_AVERAGE=from_average,
            DECOUPLED=decoupled,
            BLOCK=BLOCK,
            PART=PART,
            **OPTIONS,
        )


register("adamw_step_", adamw_step_)
