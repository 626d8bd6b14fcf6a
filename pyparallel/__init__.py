"""Gossip, pipelines and compression on PyTorch, with fused kernels for what travels."""

from . import compression, gossip, ops, pipeline
from .gossip import GossipDataParallel, topology
from .pipeline import PipelineTrainer

__all__ = [
    "GossipDataParallel",
    "PipelineTrainer",
    "compression",
    "gossip",
    "ops",
    "pipeline",
    "topology",
]
