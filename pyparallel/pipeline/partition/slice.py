"""Layers, cut into the modules of stages."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def slice_layers(layers: Sequence[nn.Module], split: Sequence[int]) -> list[nn.Sequential]:
    """One module for each stage; a layer keeps the name that it has in the whole model.

    Args:
        layers: as ``nn.Sequential`` runs them.
        split: where stages 1 and on begin.

    Raises:
        ValueError: two stages share a parameter, whose gradients nobody would add up.
    """
    edges = [0, *split, len(layers)]
    stages = [
        nn.Sequential(OrderedDict((str(index), layers[index]) for index in range(begin, end)))
        for begin, end in pairwise(edges)
    ]
    homes: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            home = homes.setdefault(id(parameter), number)
            if home != number:
                raise ValueError(
                    f"layers must not share parameters across stages, got {name} of shape "
                    f"{list(parameter.shape)} on stages {home} and {number}: move the split, or "
                    "give each its own"
                )
    return stages
