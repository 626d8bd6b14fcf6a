"""What is cut and who gets which part: rules, widths, draws."""

from .chain import Chain
from .partition import Partition
from .rules import FeedForward, Heads, Hidden, Rule
from .width import Count, Place, Width

__all__ = [
    "Chain",
    "Count",
    "FeedForward",
    "Heads",
    "Hidden",
    "Partition",
    "Place",
    "Rule",
    "Width",
]
