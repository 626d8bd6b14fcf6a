"""Gossip data parallelism: ranks average with neighbors instead of with all ranks.

``topology`` defines the neighbors and their shares, ``push_sum`` sends and mixes, ``algorithms``
combine the two, and ``GossipDataParallel`` hooks an algorithm into the user's own training loop.
"""

from ..training import ModelAverager
from . import algorithms, topology
from .algorithms import *  # noqa: F403  the algorithms that the folder exports
from .checkpoint import GossipState
from .membership import Change, Lighthouse, Membership
from .stability import stability_limit
from .trainer import GossipDataParallel

__all__ = [
    "Change",
    "GossipDataParallel",
    "GossipState",
    "Lighthouse",
    "Membership",
    "ModelAverager",
    "stability_limit",
    "topology",
]
__all__ += algorithms.__all__
