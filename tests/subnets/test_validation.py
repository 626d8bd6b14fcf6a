"""Config fields of a module; test_trainer.py tests the validation errors."""

import torch
from torch import nn

from pyparallel.subnets import Partition, Sharded
from pyparallel.subnets.validation import (
    describe,
    describe_cut_dims,
    find_validation_error,
)


def test_every_parameter_and_buffer_is_a_config_field():
    module = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3, affine=False))
    module[0].weight.requires_grad_(False)
    assert describe(module) == [
        ("number of parameters and buffers", "4"),
        ("tensor 0", "0.weight float32 [3, 2] cpu frozen"),
        ("tensor 1", "1.running_mean float32 [3] cpu"),
        ("tensor 2", "1.running_var float32 [3] cpu"),
        ("tensor 3", "1.num_batches_tracked int64 [] cpu"),
    ]


def test_a_cut_dim_is_a_config_field_with_its_units():
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 4))
    assert describe_cut_dims(Partition().cut_dims(model)) == [
        ("number of widths", "1"),
        ("width 0", "0 of 3 units along dimension 0 of 0.weight, dimension 1 of 2.weight"),
    ]


def test_a_buffer_that_cannot_be_written_is_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    model.register_buffer("places", torch.arange(3).expand(1, -1))
    assert find_validation_error(model, Partition(), 1, Sharded(), 1, None) is None
    model.register_buffer("ones", torch.ones(1).expand(3))
    found = find_validation_error(model, Partition(), 1, Sharded(), 1, None)
    assert found == "buffers must not be expanded, got ones; clone it"
