"""Independent subnetwork training: each rank trains its own units of every hidden dimension.

A partition says which dimensions are cut and which units each rank trains in a round (policy);
the exchange and the shards move and store the weights (mechanism); ``SubnetTrainer`` hooks both
into the user's training loop.
"""

from .optimizer_state import CarryState, OptimizerState, ResetState
from .partition import (
    Count,
    CutDim,
    FeedForward,
    Heads,
    Hidden,
    Partition,
    Place,
    Rule,
    SequentialChain,
)
from .placement import Central, Placement, Sharded
from .recalibrate import recalibrate
from .scale import Averaged, Scale, Scaled, Unscaled, shrink_consumers
from .trainer import SubnetTrainer

__all__ = [
    "Averaged",
    "CarryState",
    "Central",
    "Count",
    "CutDim",
    "FeedForward",
    "Heads",
    "Hidden",
    "OptimizerState",
    "Partition",
    "Place",
    "Placement",
    "ResetState",
    "Rule",
    "Scale",
    "Scaled",
    "SequentialChain",
    "Sharded",
    "SubnetTrainer",
    "Unscaled",
    "recalibrate",
    "shrink_consumers",
]
