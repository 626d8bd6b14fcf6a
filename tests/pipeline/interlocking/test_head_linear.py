"""The linear head is torch's layer, after an optional norm."""

import torch
from torch import nn

from pyparallel.pipeline.interlocking.standard_heads import LinearHead


def test_without_a_norm_it_is_a_linear_layer():
    torch.manual_seed(1)
    value = torch.randn(3, 4, 6)
    module = LinearHead(5).build(value)
    weight, bias = module.parameters()
    assert torch.equal(module(value), nn.functional.linear(value, weight, bias))


def test_the_norm_comes_first():
    value = 100 * torch.randn(3, 4, 6)
    module = LinearHead(5, nn.RMSNorm).build(value)
    assert [type(each) for each in module] == [nn.RMSNorm, nn.Linear]
    torch.testing.assert_close(module(value), module(value / 10))


def test_repr():
    assert repr(LinearHead(5)) == "LinearHead(num_outputs=5, norm=None)"
    assert repr(LinearHead(5, nn.LayerNorm)) == "LinearHead(num_outputs=5, norm=LayerNorm)"
