"""Weight prediction: the weights some updates ahead, one rule per optimizer."""

from .base import Foresight, Prediction, Unpredicted
from .displacement import Displacement, Displaces
from .rollout import Rollout

__all__ = [
    "Displacement",
    "Displaces",
    "Foresight",
    "Prediction",
    "Rollout",
    "Unpredicted",
]
