"""``predict_adam`` in Triton: the path on GPUs where no CUDA build of the package exists."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._floats import round_to
from ._register import register

BLOCK = 4096
OPTIONS = {"num_warps": 16, "enable_fp_fusion": False}


@triton.jit
def _predict_adam_block(param, exp_avg, exp_avg_sq, scalars, out, offsets, mask):
    step_size, eps = tl.load(scalars), tl.load(scalars + 1)
    own = tl.load(param + offsets, mask=mask).to(tl.float32)
    mean = tl.load(exp_avg + offsets, mask=mask).to(tl.float32)
    square = tl.load(exp_avg_sq + offsets, mask=mask).to(tl.float32)
    # Rounded as IEEE says: the plain operators of Triton approximate.
    result = own - tl.div_rn(step_size * mean, tl.sqrt_rn(square) + eps)
    tl.store(out + offsets, round_to(result, out.dtype.element_ty), mask=mask)


@triton.jit
def _predict_adam_kernel(param, exp_avg, exp_avg_sq, scalars, out, numel, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = begin + tl.arange(0, BLOCK)
    # Only accesses without a mask become 16 bytes wide, so whole blocks take a branch of their own.
    if begin + BLOCK <= numel:
        _predict_adam_block(param, exp_avg, exp_avg_sq, scalars, out, offsets, None)
    else:
        mask = offsets < numel
        _predict_adam_block(param, exp_avg, exp_avg_sq, scalars, out, offsets, mask)


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
    """Launch the kernel; arguments as ``pyparallel.ops.predict_adam`` has checked them."""
    if param.numel() == 0:
        return
    correction = (1 - beta2**step).sqrt()
    parts = (lr * horizon / (1 - beta1**step) * correction, eps * correction)
    device = param.device
    scalars = torch.stack([part.float().to(device, non_blocking=True) for part in parts])
    with torch.cuda.device_of(param):
        grid = (triton.cdiv(param.numel(), BLOCK),)
        _predict_adam_kernel[grid](
            param, exp_avg, exp_avg_sq, scalars, out, param.numel(), BLOCK=BLOCK, **OPTIONS
        )


register("predict_adam", predict_adam)
