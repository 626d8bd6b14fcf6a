"""Rules: the cut dimensions of a submodule, and rules that do not fit it."""

import pytest
from torch import nn

from pyparallel.subnets import FeedForward, Heads, Hidden, Place
from tests.subnets.helpers.models import Attention, BasicBlock, Block


def test_channels_of_a_residual_block():
    (cut_dim,) = Hidden("conv1", "conv2", norms="bn1").cut_dims(BasicBlock(4, 7), "stage.0")
    assert (cut_dim.name, cut_dim.units, cut_dim.consumers) == (
        "stage.0.conv1",
        7,
        ("stage.0.conv2",),
    )
    assert [(place.tensor.removeprefix("stage.0."), place.dim) for place in cut_dim.places] == [
        ("conv1.weight", 0),
        ("bn1.weight", 0),
        ("bn1.bias", 0),
        ("bn1.running_mean", 0),
        ("bn1.running_var", 0),
        ("conv2.weight", 1),
    ]


def test_a_gated_feed_forward_has_two_producers():
    gated = nn.ModuleDict({"up": nn.Linear(4, 6), "gate": nn.Linear(4, 6), "down": nn.Linear(6, 4)})
    (cut_dim,) = FeedForward(("up", "gate"), "down").cut_dims(gated, "")
    assert cut_dim.name == "up"
    assert Place("gate.weight", 0) in cut_dim.places
    assert Place("down.weight", 1) in cut_dim.places


def test_heads_of_fused_attention_lie_in_three_blocks():
    (cut_dim,) = Heads(qkv="qkv", project="project").cut_dims(Block(16, 4), "1")
    assert (cut_dim.name, cut_dim.units) == ("1.qkv", 4)
    assert Place("1.qkv.weight", 0, unit_size=4, blocks=3) in cut_dim.places
    assert Place("1.qkv.bias", 0, unit_size=4, blocks=3) in cut_dim.places
    assert Place("1.project.weight", 1, unit_size=4) in cut_dim.places
    assert ("1", "num_heads") in [(count.module, count.attribute) for count in cut_dim.counts]


APART = {"queries": "q", "keys": "k", "values": "v", "project": "out", "attribute": "heads"}


def test_heads_of_three_layers():
    (cut_dim,) = Heads(**APART).cut_dims(Attention(16, 4), "")
    weights = [place for place in cut_dim.places if place.tensor.endswith("weight")]
    assert [place.tensor[0] for place in weights] == ["q", "k", "v", "o"]
    assert {place.unit_size for place in weights} == {4}


def shared_keys():
    attention = Attention(16, 4)
    attention.k = nn.Linear(16, 8)
    return attention


LAYERS = nn.ModuleDict(
    {"a": nn.Linear(4, 6), "b": nn.Linear(7, 4), "c": nn.Linear(4, 5), "d": nn.Conv1d(4, 6, 1)}
)


def test_rules_that_do_not_fit_are_refused(subtests):
    for rule, module, error_text in [
        (Hidden("a", "x"), LAYERS, "name submodules of net, got 'x'; children: a, b, c"),
        (Hidden("a", "b"), LAYERS, "multiple of the 6 units of net.a as inputs, got net.b with 7"),
        (Hidden(("a", "c"), "b"), LAYERS, "got net.a with 6 and net.c with 5"),
        (Hidden((), "b"), LAYERS, "must have a producer and a consumer"),
        (FeedForward("d", "b"), LAYERS, "a feed-forward must be of Linear layers, got net.d"),
        (
            Heads(qkv="a", project="b"),
            LAYERS,
            r"net.num_heads must be the number of heads, got Non",
        ),
        (Heads(**APART), shared_keys(), "share keys and values cannot be cut"),
        (Heads(**{**APART, "keys": "heads"}), Attention(16, 4), "got 'heads'; children: q, k, v"),
    ]:
        with subtests.test(error_text), pytest.raises(ValueError, match=error_text):
            rule.cut_dims(module, "net")


def test_heads_take_either_qkv_or_three_layers(subtests):
    for names in [{}, {"queries": "q", "keys": "k"}, {"qkv": "a", "keys": "k"}]:
        raises = pytest.raises(ValueError, match="either qkv or queries, keys and values")
        with subtests.test(str(names)), raises:
            Heads(project="out", **names)
