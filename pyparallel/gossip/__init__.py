"""Data parallelism by averaging with neighbors instead of with everyone.

Topologies say who and which share (policy), ``averaging`` moves and mixes (mechanism), an algorithm
object joins the two, and ``GossipDataParallel`` hooks it into the user's own training loop.
"""

from . import topology
from .adpsgd import ADPSGD
from .algorithm import Algorithm, Session
from .all_reduce import AllReduce
from .checkpoint import GossipState
from .diloco import DiLoCo
from .dpsgd import DPSGD
from .hierarchical import Hierarchical
from .leader_sgd import LeaderSGD
from .local_sgd import LocalSGD
from .noloco import NoLoCo
from .sgp import SGP
from .slowmo import SlowMo
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
