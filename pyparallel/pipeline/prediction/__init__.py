"""Weight prediction: estimates of the weights some updates ahead."""

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
