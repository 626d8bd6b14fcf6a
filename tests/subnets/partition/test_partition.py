"""Partitions: the submodules of a rule, and conflicts between rules."""

import pytest
import torch
from torch import nn

from benchmarks.harness.libraries import load
from pyparallel.subnets import FeedForward, Hidden, Partition, SequentialChain
from tests.subnets.helpers.models import (
    RESIDUAL_RULES,
    TRANSFORMER_RULES,
    mlp,
    residual,
    transformer,
)


def names(partition, module):
    return [cut_dim.name for cut_dim in partition.cut_dims(module)]


def test_rules_find_their_submodules():
    assert names(Partition(), mlp()) == ["0", "2"]
    assert names(Partition(RESIDUAL_RULES), residual()) == ["1.conv1", "2.conv1"]
    assert names(Partition(TRANSFORMER_RULES), transformer()) == ["1.qkv", "1.mlp.0", "2.q"]


def test_a_star_stands_for_one_part_of_a_name():
    model = nn.ModuleDict({"net": nn.ModuleList([mlp(), mlp()]), "other": mlp()})
    assert names(Partition({"net.*": SequentialChain()}), model) == [
        "net.0.0",
        "net.0.2",
        "net.1.0",
        "net.1.2",
    ]


def test_one_rule_cuts_every_block_of_a_resnet():
    with torch.device("meta"):
        model = load("torchvision.models.resnet").resnet18()
    partition = Partition({"layer?.*": Hidden("conv1", "conv2", norms="bn1")})
    blocks = [f"layer{layer}.{block}.conv1" for layer in (1, 2, 3, 4) for block in (0, 1)]
    assert names(partition, model) == blocks


def test_all_cut_dims_are_drawn():
    cut_dims = Partition().cut_dims(mlp())
    drawn = Partition(seed=4).draw(cut_dims, 2, 3)
    assert {name: sum(map(len, pieces)) for name, pieces in drawn.items()} == {"0": 8, "2": 12}
    again = Partition(seed=4).draw(cut_dims, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(drawn["0"], again["0"], strict=True))


def test_so_many_neighboring_ranks_have_each_unit():
    cut_dims = Partition().cut_dims(mlp())
    drawn = Partition(seed=4, copies=2).draw(cut_dims, 2, 6)
    for name, pieces in Partition(seed=4).draw(cut_dims, 2, 3).items():
        assert len(drawn[name]) == 6
        for rank, units in enumerate(drawn[name]):
            assert torch.equal(units, pieces[rank // 2])


def test_the_repr_is_complete():
    assert repr(Partition()) == "Partition(rules=None, seed=0)"
    assert repr(Partition(copies=2)) == "Partition(rules=None, seed=0, copies=2)"
    assert repr(Partition({"a": FeedForward("x", "y")}, seed=3)) == (
        "Partition(rules={'a': FeedForward(expand='x', contract='y')}, seed=3)"
    )


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def norm_twice():
    norm = nn.BatchNorm1d(4, affine=False)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))


def test_tensors_that_cannot_be_cut_are_named(subtests):
    for rules, model, error_text in [
        (
            {"x.*": SequentialChain()},
            mlp(),
            r"got 'x\.\*', which matches none; children of the module: '0', '1', '2'",
        ),
        ({}, mlp(), "must cut something, got none"),
        (
            {"": (Hidden("0", "2"), Hidden("0", "2"))},
            mlp(),
            "dimension 0 of 0.weight must be cut by",
        ),
        (None, tied(), "must be used once, got 0.weight, which is also 2.weight"),
        (None, twice(), "must be used once, got 0.weight, which is also 2.weight"),
        (None, norm_twice(), "must be used once, got 1.running_mean, which is also 3.running_mean"),
    ]:
        with subtests.test(error_text), pytest.raises(ValueError, match=error_text):
            Partition(rules).cut_dims(model)


def test_a_tied_parameter_that_stays_whole_is_none_of_the_rules():
    model = nn.ModuleDict({"head": nn.Linear(4, 9), "net": mlp(), "letters": nn.Embedding(9, 4)})
    model["head"].weight = model["letters"].weight
    assert names(Partition({"net": SequentialChain()}), model) == ["net.0", "net.2"]


def test_a_width_of_fewer_units_than_ranks_is_named():
    cut_dims = Partition().cut_dims(mlp(hidden=3))
    assert Partition().find_units_error(cut_dims, 3) is None
    assert "4 ranks and 0 with 3 units" in Partition().find_units_error(cut_dims, 4)
    assert Partition(copies=2).find_units_error(cut_dims, 6) is None
    error = Partition(copies=2).find_units_error(cut_dims, 8)
    assert "at least one unit per subnet, got 4 subnets and 0 with 3 units" in error


def test_rules_of_a_wrong_type_are_an_error():
    for rules, sentence in [
        ("net", r"^rules must be rules by the names of submodules such as .*, or None, got 'net'"),
        ({"net": "0"}, r"^rules\['net'\] must be a rule such as FeedForward.*, got '0'"),
        ({"": SequentialChain}, r"^rules\[''\] must be .*, got the class SequentialChain; create"),
        ({"": [SequentialChain(), 3]}, r"^rules\[''\] must be .*, got 3"),
    ]:
        with pytest.raises(TypeError, match=sentence):
            Partition(rules)
