"""Interlocking backpropagation: every stage learns from the losses of a window of stages."""

from .heads import Head
from .schedule import Interlocking
from .simulate import simulate_interlocking
from .standard_heads import ConvHead, LinearHead, PooledHead, TiedHead
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
    "simulate_interlocking",
]
