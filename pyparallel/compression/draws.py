"""Random numbers for compressors whose rounding no op does."""

import zlib

import torch
from torch import Tensor

from .state import CompressorState


def uniform(shape: torch.Size, state: CompressorState, seed: int, device: torch.device) -> Tensor:
    """Float32 numbers in [0, 1), multiples of 2**-24: others for every step, rank and buffer.

    The same on every machine with such a device; a CPU and a GPU draw apart.
    """
    text = f"{state.seed(seed)}/{state.step}"  # as few bits as torch's generators may look at
    generator = torch.Generator(device).manual_seed(zlib.crc32(text.encode()))
    return torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
