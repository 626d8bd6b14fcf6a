"""``predict_adam`` in Triton, for GPUs without the compiled CUDA library."""

import torch
from torch import Tensor

import triton
import triton.language as tl

from ._floats import round_to
from ._register import register
from ._scalars import argument, read

BLOCK = 4096
OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}


@triton.jit
def _predict_adam_block(param, exp_avg, exp_avg_sq, step_size, eps, out, offsets, mask):
    own = tl.load(param + offsets, mask=mask).to(tl.float32)
    mean = tl.load(exp_avg + offsets, mask=mask).to(tl.float32)
    square = tl.load(exp_avg_sq + offsets, mask=mask).to(tl.float32)
    # Correctly rounded (IEEE): Triton's plain operators are approximate.
    result = own - tl.div_rn(read(step_size) * mean, tl.sqrt_rn(square) + read(eps))
    tl.store(out + offsets, round_to(result, out.dtype.element_ty), mask=mask)


@triton.jit
def _predict_adam_kernel(
    param, exp_avg, exp_avg_sq, step_size, eps, out, numel, BLOCK: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = begin + tl.arange(0, BLOCK)
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _predict_adam_block(param, exp_avg, exp_avg_sq, step_size, eps, out, offsets, None)
    else:
        mask = offsets < numel
        _predict_adam_block(param, exp_avg, exp_avg_sq, step_size, eps, out, offsets, mask)


def predict_adam(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    horizon: Tensor,
    out: Tensor,
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.predict_adam``."""
    if param.numel() == 0:
        return
    correction = (1 - beta2**step).sqrt()
    step_size = lr * horizon / (1 - beta1**step) * correction
    with torch.cuda.device_of(param):
        grid = (triton.cdiv(param.numel(), BLOCK),)
        _predict_adam_kernel[grid](
            param,
            exp_avg,
            exp_avg_sq,
            argument(step_size),
            argument(eps * correction),
            out,
            param.numel(),
            BLOCK=BLOCK,
            **OPTIONS,
        )


register("predict_adam", predict_adam)
