"""Messages between stages: channels, their format, and what a stage sends where."""

from .channel import Channel
from .format import Value, tensors_of
from .groups import P2PGroups

__all__ = ["Channel", "P2PGroups", "Value", "tensors_of"]
