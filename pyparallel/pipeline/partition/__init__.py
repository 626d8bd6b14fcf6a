"""How a model is cut into stages: as the user says, by measurement, or as torch has split it."""

from .auto import check_split, split_automatically
from .profile import LayerCost, measure
from .slice import cut
from .solver import balance
from .torch_pipe import layers_of

__all__ = [
    "LayerCost",
    "balance",
    "check_split",
    "cut",
    "layers_of",
    "measure",
    "split_automatically",
]
