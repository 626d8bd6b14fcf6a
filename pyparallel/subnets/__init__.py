"""Independent subnetwork training: every rank trains a part of each hidden width.

A partition says which units are cut and who gets which in a round (policy), exchange and whole move
and keep the weights (mechanism), and ``SubnetTrainer`` hooks them into the user's training loop.
"""

from .optimizer_state import CarryState, OptimizerState, ResetState
from .partition.chain import Chain
from .partition.partition import Partition
from .partition.rules import FeedForward, Heads, Hidden, Rule
from .partition.width import Count, CutDim, Place
from .placement import Central, Placement, Sharded
from .quadratic import Quadratic, drawn_sketches, every_order, permutation_sketches
from .recalibrate import recalibrate
from .scale import Averaged, Scale, Scaled, Unscaled, shrink_consumers
from .trainer import SubnetTrainer

__all__ = [
    "Averaged",
    "CarryState",
    "Central",
    "Chain",
    "Count",
    "CutDim",
    "FeedForward",
    "Heads",
    "Hidden",
    "OptimizerState",
    "Partition",
    "Place",
    "Placement",
    "Quadratic",
    "ResetState",
    "Rule",
    "Scale",
    "Scaled",
    "Sharded",
    "SubnetTrainer",
    "Unscaled",
    "drawn_sketches",
    "every_order",
    "permutation_sketches",
    "recalibrate",
    "shrink_consumers",
]
