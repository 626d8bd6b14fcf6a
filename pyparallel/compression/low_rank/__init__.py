"""Compressors whose message is a low-rank or learned code of the gradient."""

from .auto_encoder import AutoEncoder, ConvAutoEncoder
from .learned import Learned
from .power_sgd import PowerSGD

__all__ = ["AutoEncoder", "ConvAutoEncoder", "Learned", "PowerSGD"]
