"""Drop-in SGD, Adam and AdamW that step each flat bucket of parameters in one fused pass."""

from .adam import Adam, AdamW
from .fused_optimizer import FusedOptimizer
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "FusedOptimizer"]
