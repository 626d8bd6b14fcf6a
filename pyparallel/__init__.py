"""Gossip, pipelines, subnetworks and gradient compression on PyTorch, with fused kernels."""

from . import _deprecated, compression, gossip, ops, pipeline, subnets
from .gossip import SGP, GossipDataParallel, topology
from .pipeline import PipelineTrainer
from .subnets import SubnetTrainer

__version__ = "0.2.0.dev0"

__all__ = [
    "SGP",
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

_deprecated.install()
