"""Slicing of layers into the modules of stages."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from typing_extensions import override


class StageLayers(nn.Sequential):
    """A stage's layers in their order; the first one is called with the stage's arguments."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *rest = self
        value = first(*args, **kwargs)
        for layer in rest:
            value = layer(value)
        return value


def slice_layers(layers: Sequence[nn.Module], split: Sequence[int]) -> list[StageLayers]:
    """Return one module per stage; each layer keeps its name in the whole model.

    Args:
        layers: of the whole model, as ``nn.Sequential`` runs them.
        split: the first layer of stages 1, 2, ...

    Raises:
        ValueError: two stages share a parameter; its gradients would not be summed.
    """
    edges = [0, *split, len(layers)]
    stages = [
        StageLayers(OrderedDict((str(index), layers[index]) for index in range(begin, end)))
        for begin, end in pairwise(edges)
    ]
    stage_of: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            owner = stage_of.setdefault(id(parameter), number)
            if owner != number:
                raise ValueError(
                    f"layers must not share parameters across stages, got {name} of shape "
                    f"{list(parameter.shape)} on stages {owner} and {number}: move the split, or "
                    "give each stage its own"
                )
    return stages
