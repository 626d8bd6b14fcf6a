"""Algorithms whose ranks are pulled: towards leaders, or towards a center, an average."""

from .asynchronous_leader_sgd import AsynchronousLeaderSGD
from .easgd import EASGD
from .leader_sgd import LeaderSGD

__all__ = ["EASGD", "AsynchronousLeaderSGD", "LeaderSGD"]
