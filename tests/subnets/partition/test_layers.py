"""Layers that can be cut, and those that cannot."""

import pytest
from torch import nn

from pyparallel.subnets.partition.layers import Layer, join, norm_places


def places(found):
    return [(place.tensor, place.dim, place.unit_size) for place in found[0]]


def test_rows_and_columns_of_linear():
    layer = Layer("a", nn.Linear(4, 6))
    assert (layer.num_inputs, layer.num_outputs) == (4, 6)
    assert places(layer.outputs()) == [("a.weight", 0, 1), ("a.bias", 0, 1)]
    assert places(layer.inputs(2)) == [("a.weight", 1, 2)]
    assert places(Layer("a", nn.Linear(4, 6, bias=False)).outputs()) == [("a.weight", 0, 1)]


def test_a_transposed_convolution_has_its_outputs_in_columns():
    layer = Layer("a", nn.ConvTranspose2d(4, 6, 3))
    assert (layer.num_inputs, layer.num_outputs) == (4, 6)
    assert places(layer.outputs()) == [("a.weight", 1, 1), ("a.bias", 0, 1)]
    assert places(layer.inputs()) == [("a.weight", 0, 1)]


def weight_normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def test_layers_that_cannot_be_cut_are_named(subtests):
    for module, error_text in [
        (nn.Conv2d(4, 4, 3, groups=4), "must have groups=1, got net.a with groups=4"),
        (nn.Embedding(4, 4), "must be Linear or a convolution, got net.a of Embedding"),
        (nn.MultiheadAttention(4, 2), "write attention with Linear layers"),
        (weight_normed(), "got net.a whose weight is computed; remove the parametrization"),
        (nn.LSTM(4, 4), "must be Linear or a convolution, got net.a of LSTM"),
    ]:
        with subtests.test(error_text), pytest.raises(ValueError, match=error_text):
            Layer("net.a", module)


def test_all_of_a_norm_is_cut():
    found, counts = norm_places("n", nn.BatchNorm2d(6), 6)
    names = ["n.weight", "n.bias", "n.running_mean", "n.running_var"]
    assert [place.tensor for place in found] == names
    assert [count.attribute for count in counts] == ["num_features"]
    assert norm_places("n", nn.BatchNorm2d(6, affine=False), 6)[0] == found[2:]
    assert norm_places("n", nn.InstanceNorm1d(6), 6)[0] == []
    assert norm_places("n", nn.BatchNorm1d(12), 6)[0][0].unit_size == 2
    assert norm_places("n", nn.PReLU(), 6) == ([], [])


def test_norms_that_mix_units_are_refused(subtests):
    for norm, error_text in [
        (nn.LayerNorm(6), "got n of LayerNorm; use BatchNorm"),
        (nn.GroupNorm(2, 6), "got n of GroupNorm"),
        (nn.SyncBatchNorm(6), "got n of SyncBatchNorm"),
        (nn.BatchNorm1d(6, track_running_stats=False), "must track running statistics, got n"),
        (nn.BatchNorm1d(5), "a multiple of the 6 units it follows, got n with 5"),
    ]:
        with subtests.test(error_text), pytest.raises(ValueError, match=error_text):
            norm_places("n", norm, 6)


def test_names_within_the_model():
    assert [join("", "a"), join("a", ""), join("a", "b")] == ["a", "a", "a.b"]
