"""Gossip and pipeline training on PyTorch, with fused kernels for what they send and predict."""

from . import gossip, ops, pipeline
from .gossip import GossipDataParallel, topology

__all__ = ["GossipDataParallel", "gossip", "ops", "pipeline", "topology"]
