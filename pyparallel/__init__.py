"""Gossip, pipelines and compression on PyTorch, with fused kernels for what travels."""

from . import compression, gossip, ops, pipeline, subnets
from .gossip import GossipDataParallel, topology
from .pipeline import PipelineTrainer
from .subnets import SubnetTrainer

__all__ = [
    "GossipDataParallel",
    "PipelineTrainer",
    "SubnetTrainer",
    "compression",
    "gossip",
    "ops",
    "pipeline",
    "subnets",
    "topology",
]
