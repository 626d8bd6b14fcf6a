"""Weight prediction, and corrections of delayed gradients."""

from .base import NoPrediction, Prediction, WeightPredictor
from .corrections import Correction, DelayedOptimizer, StageMomentum, UpdateErrorFeedback
from .displacement import Displacement, PredictsStep
from .last_update import LastUpdate
from .rollout import Rollout

__all__ = [
    "Correction",
    "DelayedOptimizer",
    "Displacement",
    "LastUpdate",
    "NoPrediction",
    "Prediction",
    "PredictsStep",
    "Rollout",
    "StageMomentum",
    "UpdateErrorFeedback",
    "WeightPredictor",
]
