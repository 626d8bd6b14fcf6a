"""Subnets as smaller modules, and parameters whose memory is released."""

import copy

import torch
from torch import nn

from pyparallel.subnets import Partition, SequentialChain
from pyparallel.subnets.partition.tensor_cut import find_cuts
from pyparallel.subnets.subnet import allocate, build_subnet, is_released, release, tensors_of
from tests.subnets.helpers.models import mlp


def build(model, partition, rank, num):
    cut_dims = partition.cut_dims(model)
    return build_subnet(model, cut_dims, find_cuts(cut_dims, tensors_of(model)), rank, num)


def num_weights(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_uncut_parameters_are_copies():
    model = mlp()
    subnet = build(model, Partition(), 0, 2)
    assert torch.equal(subnet[4].bias, model[4].bias)
    assert subnet[4].bias is not model[4].bias
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        subnet[4].bias.add_(1)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert num_weights(subnet) < num_weights(model)


def test_frozen_parameters_tied_ones_and_modes_persist():
    model = nn.ModuleDict({"net": mlp(), "head": nn.Linear(4, 9), "letters": nn.Embedding(9, 4)})
    model["head"].weight = model["letters"].weight
    model["net"][0].weight.requires_grad_(False)
    model["net"].eval()
    subnet = build(model, Partition({"net": SequentialChain()}), 0, 2)
    assert subnet["head"].weight is subnet["letters"].weight
    assert not subnet["net"][0].weight.requires_grad
    assert subnet["net"][2].weight.requires_grad
    assert subnet.training
    assert not subnet["net"].training


def test_weights_keep_their_memory_format_and_no_more_memory():
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3))
    subnet = build(model.to(memory_format=torch.channels_last), Partition(), 1, 2)
    for layer in (subnet[0], subnet[2]):
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
        assert not layer.weight.is_contiguous()
        assert layer.weight.untyped_storage().nbytes() == 4 * layer.weight.numel()
        assert not layer.weight.any()


def test_released_parameters_have_no_memory_and_read_as_nan(subtests):
    for dtype in [torch.float32, torch.bfloat16]:
        with subtests.test(str(dtype)):
            layer = nn.Linear(30, 20, dtype=dtype)
            held = list(layer.parameters())
            layer(torch.ones(1, 30, dtype=dtype)).sum().backward()
            release(layer.parameters())
            assert [p.untyped_storage().nbytes() for p in layer.parameters()] == [
                dtype.itemsize
            ] * 2
            assert layer.weight.shape == (20, 30)
            assert layer.weight.grad is None
            assert layer(torch.ones(1, 30, dtype=dtype)).isnan().all()
            assert is_released(layer.weight)
            allocate(layer.parameters())
            assert all(a is b for a, b in zip(held, layer.parameters(), strict=True))
            assert not is_released(layer.weight)
            with torch.no_grad():
                layer.weight.fill_(1)
            assert layer.weight.eq(1).all()


def test_a_single_number_is_never_reported_as_released():
    assert not is_released(nn.Parameter(torch.zeros(())))
    assert not is_released(nn.Parameter(torch.zeros(1, 1)))
