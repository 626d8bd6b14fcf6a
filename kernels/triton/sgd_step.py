"""``sgd_step_`` in Triton, for GPUs without the compiled CUDA library; ``clear_nonfinite_``."""

from itertools import accumulate

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
    new_table,
    settle,
    store_rounded,
    take_messages,
)

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = 32  # of a tensor that is cleared: programs, of which each has nothing to do in most steps


@triton.jit
def _step(
    before, old_velocity, gradient, momentum_buffer, nonfinite, numbers, offsets, stepped,
    NESTEROV: tl.constexpr,
):  # fmt: skip
    factor, decay, momentum, share, rate = numbers
    scaled = read(factor) * gradient
    gradient = scaled + read(decay) * before
    velocity = momentum * old_velocity + share * gradient
    update = gradient + momentum * velocity if NESTEROV else velocity
    own = before - read(rate) * update
    stored = stepped
    if nonfinite is not None:
        stepped = count_nonfinite(scaled, nonfinite, stepped)
    if stepped is not None:
        own = tl.where(stepped, own, before)
        velocity = tl.where(stepped, velocity, old_velocity)
    if momentum_buffer is not None:
        velocity = store_rounded(velocity, momentum_buffer, offsets, stored)
    return own, velocity


@triton.jit
def _sgd_step_block(
    param, gradient, has, stepped, momentum_buffer, mixing, outputs, numbers, ahead_rate,
    found_inf, offsets, mask,
    NUM_MESSAGES: tl.constexpr, MIX_AFTER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    nonfinite, prediction, message = outputs
    own = load(param, offsets, mask)
    if not MIX_AFTER:
        own = mix_messages(own, mixing, offsets, mask, NUM_MESSAGES)
    velocity = tl.zeros_like(own)
    if momentum_buffer is not None:
        velocity = load(momentum_buffer, offsets, mask)
    if has and (found_inf is None or read(found_inf) == 0):
        own, velocity = _step(
            own, velocity, gradient, momentum_buffer, nonfinite, numbers, offsets, stepped, NESTEROV
        )
    own = settle(own, param, mixing, message, offsets, mask, NUM_MESSAGES, MIX_AFTER)
    if prediction is not None:
        store_rounded(own - read(ahead_rate) * velocity, prediction, offsets, mask)


@triton.jit
def _sgd_step_kernel(
    param,
    grad,
    table,
    num_rows,
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
    PART: tl.constexpr,
):
    mixing, outputs = (messages, coefficients), (nonfinite, prediction, message)
    numbers = (factor, decay, momentum, share, rate)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    row = find_rows(table, num_rows, begin)
    # Only unmasked accesses become 16 bytes wide, so full blocks of one row have their own branch.
    if tl.load(row + 2) >= begin + BLOCK:
        offsets = begin + tl.arange(0, BLOCK)
        address = find_grads(row, grad, begin)
        _sgd_step_block(
            param, load_grad(address, grad, BLOCK), address != 0, None, momentum_buffer, mixing,
            outputs, numbers, ahead_rate, found_inf, offsets, None,
            NUM_MESSAGES, MIX_AFTER, NESTEROV,
        )  # fmt: skip
    else:
        for first in range(begin, tl.minimum(begin + BLOCK, numel), PART):
            offsets = first + tl.arange(0, PART)
            addresses = find_grads(find_rows(table, num_rows, offsets), grad, offsets)
            _sgd_step_block(
                param, load_grads(addresses, grad), True, addresses != 0, momentum_buffer, mixing,
                outputs, numbers, ahead_rate, found_inf, offsets, offsets < numel,
                NUM_MESSAGES, MIX_AFTER, NESTEROV,
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
        if param.numel() == 0:
            return
        _sgd_step_kernel[(triton.cdiv(param.numel(), BLOCK),)](
            param,
            *grad_table(param, grads, offsets),
            momentum_buffer,
            incoming or None,
            nonfinite,
            prediction,
            message,
            *numbers,
            coefficients,
            param.numel(),
            NUM_MESSAGES=len(incoming),
            MIX_AFTER=mix_after,
            NESTEROV=nesterov,
            BLOCK=BLOCK,
            PART=PART,
            **OPTIONS,
        )


register("sgd_step_", sgd_step_)


@triton.jit
def _clear_nonfinite_kernel(like, table, found, PART: tl.constexpr):
    row = table + 2 * tl.program_id(0)
    if tl.load(found) != 0:
        numel = tl.load(row + 2) - tl.load(row)
        tensor = tl.load(row + 1).to(like.dtype)
        first = tl.program_id(1) * PART
        for begin in range(first, numel, tl.num_programs(1) * PART):
            offsets = begin + tl.arange(0, PART)
            is_finite = tl.abs(load(tensor, offsets, offsets < numel)) < float("inf")  # not of NaN
            zero = tl.zeros([PART], like.dtype.element_ty)
            tl.store(tensor + offsets, zero, mask=(is_finite == 0) & (offsets < numel))


def clear_nonfinite_(tensors: list[Tensor], found: Tensor) -> None:
    """Launch the kernel for each dtype, with arguments of ``pyparallel.ops.clear_nonfinite_``."""
    for each in tensors:
        if each.dtype not in FLOAT_DTYPES or not each.is_contiguous():
            each.nan_to_num_(0.0, 0.0, 0.0)
    with torch.cuda.device_of(found):
        for dtype in FLOAT_DTYPES:
            fitting = (each for each in tensors if each.dtype == dtype and each.is_contiguous())
            chosen = [each for each in fitting if each.numel() > 0]
            *offsets, numel = accumulate((each.numel() for each in chosen), initial=0)
            if chosen:
                table, _ = new_table(numel, found.device, chosen, offsets)
                grid, flag = (len(chosen), PARTS), found.view(torch.uint8)
                _clear_nonfinite_kernel[grid](chosen[0], table, flag, PART=PART)


register("clear_nonfinite_", clear_nonfinite_)
