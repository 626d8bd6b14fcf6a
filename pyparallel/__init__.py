"""Gossip and pipeline training on PyTorch, with fused kernels for what they send and predict."""

from . import ops

__all__ = ["ops"]
