"""The stored rows of the full model: weights, optimizer state, and a checkpoint of them."""

import pytest
import torch

from pyparallel.comm import Collectives
from pyparallel.subnets import Partition, Sharded
from pyparallel.subnets.partition.tensor_cut import find_cuts
from pyparallel.subnets.shards import ModelShards
from pyparallel.subnets.subnet import tensors_of
from tests.subnets.helpers.models import mlp


def make(collectives):
    model = mlp()
    tensors = tensors_of(model)
    cuts = find_cuts(Partition().cut_dims(model), tensors)
    return ModelShards(cuts, tensors, Sharded(), collectives), tensors


def test_state_that_no_subnet_has_had_is_zero():
    shards, _ = make(Collectives())
    state = {"0.weight": {"momentum": torch.ones(8, 5, dtype=torch.float64)}}
    (tensor,) = shards.state_tensors(state)
    assert tensor.rows.dtype == torch.float64
    assert not tensor.rows.any()
    (again,) = shards.state_tensors(state)
    assert again.rows is tensor.rows


def test_a_loaded_checkpoint_is_a_copy():
    collectives = Collectives()
    shards, _ = make(collectives)
    shards.state_tensors({"0.weight": {"momentum": torch.ones(8, 5)}})[0].rows.fill_(3)
    saved = shards.state_dict()
    other, _ = make(collectives)
    other.load_state_dict(saved)
    loaded = other.state_dict()
    assert all(torch.equal(loaded["rows"][n], rows) for n, rows in saved["rows"].items())
    assert loaded["states"]["0.weight"]["momentum"].eq(3).all()
    saved["states"]["0.weight"]["momentum"].fill_(4)
    assert loaded["states"]["0.weight"]["momentum"].eq(3).all()


def test_initial_state_is_that_of_every_entry():
    shards, _ = make(Collectives())
    shards.init_states({"0.weight": {"sum": torch.full((8, 5), 2.0)}, "2.weight": {}})
    assert shards.state_dict()["states"]["0.weight"]["sum"].eq(2).all()
    with pytest.raises(ValueError, match=r"got several for 0.bias; use ResetState\(\)"):
        shards.init_states({"0.bias": {"average": torch.arange(8.0)}})
