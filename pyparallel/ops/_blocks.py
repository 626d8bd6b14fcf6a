"""Messages with one scale for each block of neighbors."""

import torch
from torch import Tensor

from ._checks import describe


def check_block_size(block_size: int) -> None:
    """Refuse blocks that the kernels do not walk."""
    if not (32 <= block_size <= 4096 and block_size & (block_size - 1) == 0):
        raise ValueError(f"block_size must be a power of two from 32 to 4096, got {block_size}")


def num_blocks(numel: int, block_size: int) -> int:
    """The length of the scales; the last block may be short."""
    return -(-numel // block_size)


def check_flat(
    name: str, tensor: Tensor, dtype: torch.dtype, length: int, device: torch.device
) -> None:
    """Refuse memory that is not of this dtype, length and device."""
    fits = tensor.dtype == dtype and tuple(tensor.shape) == (length,) and tensor.is_contiguous()
    if not (fits and tensor.device == device):
        raise ValueError(
            f"{name} must be a contiguous {str(dtype).removeprefix('torch.')} tensor of shape "
            f"[{length}] on {device}, got {describe(tensor)}"
        )
