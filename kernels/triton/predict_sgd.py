"""``predict_sgd`` in Triton, for GPUs without the compiled CUDA library."""

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
def _predict_sgd_block(param, momentum_buffer, scale, out, offsets, mask):
    own = tl.load(param + offsets, mask=mask).to(tl.float32)
    momentum = tl.load(momentum_buffer + offsets, mask=mask).to(tl.float32)
    result = own - read(scale) * momentum
    tl.store(out + offsets, round_to(result, out.dtype.element_ty), mask=mask)


@triton.jit
def _predict_sgd_kernel(param, momentum_buffer, scale, out, numel, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = begin + tl.arange(0, BLOCK)
    # Only unmasked accesses become 16 bytes wide, so full blocks have their own branch.
    if begin + BLOCK <= numel:
        _predict_sgd_block(param, momentum_buffer, scale, out, offsets, None)
    else:
        _predict_sgd_block(param, momentum_buffer, scale, out, offsets, offsets < numel)


def predict_sgd(
    param: Tensor, momentum_buffer: Tensor, lr: Tensor, horizon: Tensor, out: Tensor
) -> None:
    """Launch the kernel with arguments checked by ``pyparallel.ops.predict_sgd``."""
    if param.numel() == 0:
        return
    scale = argument(lr * horizon)
    with torch.cuda.device_of(param):
        grid = (triton.cdiv(param.numel(), BLOCK),)
        _predict_sgd_kernel[grid](
            param, momentum_buffer, scale, out, param.numel(), BLOCK=BLOCK, **OPTIONS
        )


register("predict_sgd", predict_sgd)
