"""Slicing of layers into stages."""

import pytest
import torch
from torch import nn

from pyparallel.pipeline.partition.slice import slice_layers


def test_layers_keep_their_names():
    layers = [nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)]
    stages = slice_layers(layers, [1])
    assert [len(stage) for stage in stages] == [1, 2]
    names = {name for stage in stages for name in stage.state_dict()}
    assert names == set(nn.Sequential(*layers).state_dict())
    assert stages[0][0] is layers[0]


def test_parameters_can_be_tied_only_within_a_stage():
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    layers = [first, nn.Tanh(), last, nn.Tanh()]
    assert torch.equal(slice_layers(layers, [3])[0][2].weight, first.weight)
    with pytest.raises(ValueError, match=r"got 2.weight of shape \[3, 3\] on stages 0 and 1: move"):
        slice_layers(layers, [2])
