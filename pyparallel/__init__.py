"""Gossip and pipeline training on PyTorch, with fused kernels for what they send and predict."""

from . import gossip, ops, pipeline
from .gossip import GossipDataParallel, topology
from .pipeline import PipelineTrainer

__all__ = ["GossipDataParallel", "PipelineTrainer", "gossip", "ops", "pipeline", "topology"]
