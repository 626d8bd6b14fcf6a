"""Buffers, messages and residuals of the tests of compressors."""

import torch

from pyparallel.compression import BufferLayout, Piece

CPU = torch.device("cpu")


def layout_of(numel):
    """Return the layout of a weight and a bias, or of one of them."""
    bias = min(numel, 7)
    return BufferLayout((Piece("fc.weight", (numel - bias,)), Piece("fc.bias", (bias,))))


def send(compressor, x, state, residual=None):
    """Return what a receiver decodes of a message."""
    message = compressor.compress(x, state, residual)
    return compressor.decompress(message, state.layout, torch.empty(x.numel()))


def gradient(rank, step, numel):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(numel, generator=generator)


def residual_of(state):
    """Return the sum of all residuals, flat."""
    flat = torch.zeros(state.layout.numel)
    parts = state.layout.split(flat)
    for part, tensors in zip(parts, state.parameter_state().values(), strict=True):
        for key, tensor in tensors.items():
            if key.rpartition(".")[2] == "residual":
                part.add_(tensor)
    return flat
