"""Scaling of consumers' inputs and weights."""

import torch

from pyparallel.subnets import Averaged, Partition, Scaled, Unscaled, shrink_consumers
from pyparallel.subnets.partition.tensor_cut import find_cuts
from pyparallel.subnets.subnet import build_subnet, tensors_of
from tests.subnets.helpers.models import mlp


def subnet_of(scale, num):
    model = mlp(8, 12)
    cut_dims = Partition().cut_dims(model)
    torch.manual_seed(0)
    subnet = build_subnet(model, cut_dims, find_cuts(cut_dims, tensors_of(model)), 0, num)
    with torch.no_grad():
        for parameter in subnet.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    scale.apply(subnet, cut_dims, 0, num)
    return subnet


def test_inputs_of_consumers_are_scaled_by_all_units_over_the_subnets():
    x = torch.randn(4, 5)
    plain, scaled = subnet_of(Unscaled(), 4), subnet_of(Scaled(), 4)
    inner = torch.relu(plain[0](x)) * 4
    inner = torch.tanh(plain[2](inner)) * 4
    torch.testing.assert_close(scaled(x), plain[4](inner))
    weights = zip(plain.parameters(), scaled.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    assert not torch.equal(scaled(x), plain(x))


def test_only_the_mean_enlarges_weights():
    policies = (Unscaled(), Scaled(), Averaged())
    assert [policy.enlargement(4) for policy in policies] == [1, 1, 4]
    x = torch.randn(4, 5)
    assert torch.equal(subnet_of(Averaged(), 4)(x), subnet_of(Unscaled(), 4)(x))


def test_weights_of_consumers_are_shrunk():
    model, given = mlp(8, 12), mlp(8, 12)
    given.load_state_dict(model.state_dict())
    shrink_consumers(model, Partition(), 4)
    for name, parameter in model.named_parameters():
        times = 4 if name in ("2.weight", "4.weight") else 1
        assert torch.equal(parameter * times, given.get_parameter(name))
