"""Partition of a model into stages: given, by profiling, or from torch's pipelines."""

from .auto import check_split, split_automatically
from .model_parts import ModelParts
from .profile import LayerCost, profile_layers
from .slice import slice_layers
from .solver import balance
from .split_model import SplitModel, split_model
from .torch_pipe import layers_and_split

__all__ = [
    "LayerCost",
    "ModelParts",
    "SplitModel",
    "balance",
    "check_split",
    "layers_and_split",
    "profile_layers",
    "slice_layers",
    "split_automatically",
    "split_model",
]
