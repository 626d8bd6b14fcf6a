"""What only torch's optimizers step is refused by a sentence that names them."""

import re

import pytest
import torch
from torch import nn

import pyparallel.optim
from pyparallel.optim import SGD, Adam, AdamW, FusedOptimizer
from tests.optim.pairs import ALL, make_parameters
from tests.workers import on_ranks

CLASSES = (SGD, Adam, AdamW)


class OwnParameter(nn.Parameter):
    pass


def zeros(dtype):
    return nn.Parameter(torch.zeros(3, dtype=dtype))


def sparse():
    return nn.Parameter(torch.eye(3).to_sparse())


def shared():
    return nn.Parameter(torch.zeros(3).share_memory_())


REFUSED = {
    "float64": lambda: zeros(torch.float64),
    "complex64": lambda: zeros(torch.complex64),
    "torch.sparse_coo": sparse,
    "shared memory": shared,
    "OwnParameter": lambda: OwnParameter(torch.zeros(3)),
}


def refused(name):
    return pytest.raises(ValueError, match=rf"(?s).*; use torch\.optim\.{name}$")


def test_parameters_are_refused_at_once_and_in_groups_added_later():
    for cls in CLASSES:
        name = cls.__name__
        for got, make in REFUSED.items():
            with refused(name) as caught:
                cls([zeros(torch.float32), make()])
            assert re.search(rf"got .*{got} as number 1", str(caught.value))
            optimizer = cls(make_parameters())
            with refused(name):
                optimizer.add_param_group({"params": [make()]})
            assert len(optimizer.param_groups) == 1  # goes on without it
            optimizer.step()


@on_ranks(1)
def test_a_dtensor_is_refused(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    tensor = distribute_tensor(torch.zeros(3), init_device_mesh("cpu", (1,)), [Replicate()])
    with refused("AdamW") as caught:
        AdamW([nn.Parameter(tensor)])
    assert "got a DTensor as number 0 of a group; use torch.optim.AdamW" in str(caught.value)


def test_parameters_converted_later_are_refused():
    for convert, is_stepped in ((nn.Module.double, True), (nn.Module.share_memory, False)):
        module = nn.Linear(3, 2)
        optimizer = Adam(module.parameters())
        if is_stepped:
            optimizer.step()
        convert(module)
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        with refused("Adam"):
            optimizer.step()


def test_options_are_refused_wherever_they_come_from():
    for cls in CLASSES:
        name = cls.__name__
        options = ("differentiable",) if cls is SGD else ("differentiable", "amsgrad")
        for option in options:
            with refused(name):
                cls(make_parameters(), **{option: True})
            with refused(name):
                cls([{"params": make_parameters(), option: True}])
            optimizer = cls(make_parameters())
            with refused(name):
                optimizer.add_param_group({"params": make_parameters(), option: True})
            assert len(optimizer.param_groups) == 1
            optimizer.param_groups[0][option] = True
            with refused(name):
                optimizer.step()
            optimizer.param_groups[0][option] = False
            optimizer.step()


def test_a_state_with_amsgrad_is_not_loaded():
    parameters = make_parameters()
    theirs = torch.optim.AdamW(make_parameters(), amsgrad=True)
    for each in (parameters, theirs.param_groups[0]["params"]):
        for p in each:
            p.grad = torch.ones_like(p)
    theirs.step()
    ours = AdamW(parameters)
    ours.step()
    before = ours.state_dict()
    with refused("AdamW"):
        ours.load_state_dict(theirs.state_dict())
    assert not ours.param_groups[0]["amsgrad"]
    assert all(float(s["step"]) == 1 for s in before["state"].values())
    ours.step()
    assert all(float(s["step"]) == 2 for s in ours.state_dict()["state"].values())


def test_sparse_gradients_are_refused():
    for name, options in ALL.items():
        table = nn.Embedding(5, 3, sparse=True)
        table(torch.tensor([1, 2])).sum().backward()
        before = table.weight.detach().clone()
        optimizer = getattr(pyparallel.optim, name)(table.parameters(), **options)
        with pytest.raises(RuntimeError, match=r"use\s+torch\.optim\.SGD or SparseAdam"):
            optimizer.step()
        torch.testing.assert_close(table.weight.detach(), before)


def test_parameters_that_share_memory_are_refused():
    base = torch.zeros(8)
    tied = [nn.Parameter(base[:5]), nn.Parameter(base[4:])]
    for p in tied:
        p.grad = torch.ones_like(p)
    optimizer: FusedOptimizer = SGD(tied, lr=1.0)
    with pytest.raises(ValueError, match=r"register one nn\.Parameter"):
        optimizer.step()
    twice = pytest.raises(ValueError, match=r"twice in a group; use torch\.optim\.SGD")
    with twice, pytest.warns(UserWarning, match="duplicate parameters"):
        SGD([tied[0], tied[0]])
    with pytest.raises(ValueError, match="more than one parameter group"):
        SGD([{"params": tied[:1]}, {"params": tied}])
    neighbors = [nn.Parameter(base[:4]), nn.Parameter(base[4:])]
    optimizer = SGD(neighbors, lr=1.0)
    for p in neighbors:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all((p == -1).all() for p in neighbors)
