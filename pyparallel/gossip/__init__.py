"""Data parallelism by averaging with neighbors instead of with everyone.

Topologies say who and which share (policy), ``averaging`` moves and mixes (mechanism), an algorithm
object joins the two, and ``GossipDataParallel`` hooks it into the user's own training loop.
"""

from . import topology
from .algorithm import Algorithm, Session
from .all_reduce import AllReduce
from .dpsgd import DPSGD
from .hierarchical import Hierarchical
from .leader_sgd import LeaderSGD
from .noloco import NoLoCo
from .periodic import DiLoCo, LocalSGD, SlowMo
from .sgp import SGP
from .trainer import GossipDataParallel

__all__ = [
    "DPSGD",
    "SGP",
    "Algorithm",
    "AllReduce",
    "DiLoCo",
    "GossipDataParallel",
    "Hierarchical",
    "LeaderSGD",
    "LocalSGD",
    "NoLoCo",
    "Session",
    "SlowMo",
    "topology",
]
