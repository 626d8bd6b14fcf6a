"""Gossip data parallelism: ranks average with neighbors instead of with all ranks.

``topology`` defines the neighbors and their shares, ``push_sum`` sends and mixes, ``algorithms``
combine the two, and ``GossipDataParallel`` hooks an algorithm into the user's own training loop.
"""

from .. import _deprecated
from ..comm import ModelAverager
from . import topology
from .algorithms import (
    ADPSGD,
    DPSGD,
    SGP,
    Algorithm,
    AllReduce,
    DiLoCo,
    Hierarchical,
    LeaderSGD,
    LocalSGD,
    NoLoCo,
    SlowMo,
)
from .checkpoint import GossipState
from .trainer import GossipDataParallel

__all__ = [
    "ADPSGD",
    "DPSGD",
    "SGP",
    "Algorithm",
    "AllReduce",
    "DiLoCo",
    "GossipDataParallel",
    "GossipState",
    "Hierarchical",
    "LeaderSGD",
    "LocalSGD",
    "ModelAverager",
    "NoLoCo",
    "SlowMo",
    "topology",
]


_deprecated.install(__name__)
