"""Weight prediction: the weights some updates ahead, one rule per optimizer."""

from .base import NoPrediction, Prediction, WeightPredictor
from .displacement import Displacement, PredictsStep
from .rollout import Rollout

__all__ = [
    "Displacement",
    "NoPrediction",
    "Prediction",
    "PredictsStep",
    "Rollout",
    "WeightPredictor",
]
