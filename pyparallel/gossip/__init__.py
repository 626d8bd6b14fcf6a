"""Gossip data parallelism: ranks average with neighbors instead of with all ranks.

``topology`` defines the neighbors and their shares, ``push_sum`` sends and mixes, ``algorithms``
combine the two, and ``GossipDataParallel`` hooks an algorithm into the user's own training loop.
"""

from . import topology
from .algorithms.adpsgd import ADPSGD
from .algorithms.all_reduce import AllReduce
from .algorithms.base import Algorithm, Session
from .algorithms.diloco import DiLoCo
from .algorithms.dpsgd import DPSGD
from .algorithms.hierarchical import Hierarchical
from .algorithms.leader_sgd import LeaderSGD
from .algorithms.local_sgd import LocalSGD
from .algorithms.noloco import NoLoCo
from .algorithms.sgp import SGP
from .algorithms.slowmo import SlowMo
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
    "NoLoCo",
    "Session",
    "SlowMo",
    "topology",
]
