"""What is cut and who gets which part: rules, widths, draws."""

from .chain import Chain
from .partition import Partition
from .rules import FeedForward, Heads, Hidden, Rule
from .width import Count, CutDim, Place

__all__ = [
    "Chain",
    "Count",
    "CutDim",
    "FeedForward",
    "Heads",
    "Hidden",
    "Partition",
    "Place",
    "Rule",
]
