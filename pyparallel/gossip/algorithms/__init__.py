"""Gossip algorithms: one frozen dataclass for each, with the averager that runs it on a rank."""

from ...training import Algorithm
from .adpsgd import ADPSGD
from .all_reduce import AllReduce
from .base import OnTopology
from .diloco import DiLoCo, MuLoCo, SparseLoCo, StreamingDiLoCo
from .dpsgd import DPSGD
from .hierarchical import Hierarchical
from .noloco import NoLoCo
from .osgp import OSGP
from .periodic import LocalSGD
from .pulls import EASGD, AsynchronousLeaderSGD, LeaderSGD
from .sgp import SGP
from .slowmo import SlowMo

__all__ = [
    "ADPSGD",
    "DPSGD",
    "EASGD",
    "OSGP",
    "SGP",
    "Algorithm",
    "AllReduce",
    "AsynchronousLeaderSGD",
    "DiLoCo",
    "Hierarchical",
    "LeaderSGD",
    "LocalSGD",
    "MuLoCo",
    "NoLoCo",
    "OnTopology",
    "SlowMo",
    "SparseLoCo",
    "StreamingDiLoCo",
]
