"""Random numbers for compressors whose rounding is not a fused op."""

import zlib

import torch
from torch import Tensor

from .state import CompressorState


def uniform(shape: torch.Size, state: CompressorState, seed: int, device: torch.device) -> Tensor:
    """Return float32 numbers in [0, 1), multiples of 2**-24, different per step, rank and buffer.

    Reproducible for one device type; CPU and GPU draw different numbers.
    """
    text = f"{state.seed(seed)}/{state.step}"  # hashed: generators may use only 32 bits
    generator = torch.Generator(device).manual_seed(zlib.crc32(text.encode()))
    return torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
