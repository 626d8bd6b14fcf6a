"""Interlocking backpropagation: every stage learns from the losses of a window of stages."""

from .head_conv import ConvHead
from .head_linear import LinearHead
from .head_pooled import PooledHead
from .head_tied import TiedHead
from .heads import Head
from .schedule import Interlocking
from .simulate import simulate_interlocking
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
