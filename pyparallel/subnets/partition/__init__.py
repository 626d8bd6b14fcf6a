"""Partition of a model into subnets: rules, cut dimensions, random assignments."""

from .chain import SequentialChain
from .cut_dim import Count, CutDim, Place
from .partition import Partition
from .rules import FeedForward, Heads, Hidden, Rule

__all__ = [
    "Count",
    "CutDim",
    "FeedForward",
    "Heads",
    "Hidden",
    "Partition",
    "Place",
    "Rule",
    "SequentialChain",
]
