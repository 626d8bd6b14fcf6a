"""Interlocking backpropagation: every stage learns from the losses of a window of stages."""

from .heads import ConvHead, Head, LinearHead, PooledHead, TiedHead
from .schedule import Interlocking
from .window import Farthest, Mean, Sum, Window

__all__ = [
    "ConvHead",
    "Farthest",
    "Head",
    "Interlocking",
    "LinearHead",
    "Mean",
    "PooledHead",
    "Sum",
    "TiedHead",
    "Window",
]
