"""Slicing of layers into stages."""

import re

import pytest
import torch
from torch import nn

from pyparallel.pipeline import Skippable
from pyparallel.pipeline.partition.slice import find_ties, slice_layers


def test_layers_keep_their_names():
    layers = [nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)]
    stages = slice_layers(layers, [1])
    assert [len(stage) for stage in stages] == [1, 2]
    names = {name for stage in stages for name in stage.state_dict()}
    assert names == set(nn.Sequential(*layers).state_dict())
    assert stages[0][0] is layers[0]


def test_the_first_stage_that_holds_a_parameter_owns_it():
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    layers = [first, nn.Tanh(), last, nn.Tanh()]
    assert not find_ties(slice_layers(layers, [3]))
    for travel in (False, True):
        stages = slice_layers(layers, [1, 2], ties_travel=travel)
        owned = [[name for name, _ in stage.owned_parameters()] for stage in stages]
        assert owned == [["0.weight", "0.bias"], [], ["2.bias"]]
        (tie,) = find_ties(stages)
        assert tie.stages == [0, 2]
        assert str(tie) == "2.weight of shape [3, 3] on stages 0 and 2"
        names = [len(stage.skips_out) for stage in stages]
        assert names == ([1, 1, 0] if travel else [0, 0, 0])


def test_skips_travel_from_their_stage_to_the_last_that_pops_them():
    layers = [
        Skippable(nn.Linear(2, 2), stash="a"),
        Skippable(nn.Bilinear(2, 2, 2), stash="b", pop="a"),
        nn.Tanh(),
        Skippable(nn.Bilinear(2, 2, 2), pop=["b"]),
        nn.Tanh(),
    ]
    stages = slice_layers(layers, [1, 3, 4])
    assert [stage.skips_in for stage in stages] == [(), ("a",), ("b",), ()]
    value = stages[0](torch.ones(1, 2))
    assert isinstance(value, tuple)
    for stage in stages[1:]:
        value = stage(value)
    whole = slice_layers(layers, [])[0]
    assert torch.equal(value, whole(torch.ones(1, 2)))


MISTAKES = {
    "never popped": (
        [Skippable(nn.Tanh(), stash="a")],
        "stash must be popped by a later layer, got 'a'",
    ),
    "never stashed": (
        [nn.Tanh(), Skippable(nn.Tanh(), pop="a")],
        "pop must name what an earlier layer has stashed, got 'a' in layers[1]; stashed",
    ),
    "stashed twice": (
        [Skippable(nn.Tanh(), stash="a"), Skippable(nn.Tanh(), stash="a")],
        "stash must be a name of its own for each layer, got 'a' again in layers[1]",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_skip_connection_without_an_end_is_refused(name):
    layers, sentence = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        slice_layers(layers, [])


def test_a_wrong_value_beside_a_skip_connection_is_refused():
    class One(nn.Module):
        def forward(self, value):
            return (value,)

    layers = [Skippable(nn.Tanh(), stash="a"), One(), Skippable(nn.Bilinear(2, 2, 2), pop="a")]
    stages = slice_layers(layers, [2])
    with pytest.raises(TypeError, match="must be a tensor or a tuple of two tensors or more"):
        stages[0](torch.ones(1, 2))
    layers = [Skippable(One(), stash="a"), Skippable(nn.Bilinear(2, 2, 2), pop="a")]
    with pytest.raises(TypeError, match="must return one tensor, got tuple for 'a'"):
        slice_layers(layers, [1])[0](torch.ones(1, 2))
    with pytest.raises(TypeError, match="stash and pop must be names, got 1"):
        Skippable(nn.Tanh(), pop=[1])
