"""A trial run restores the modules."""

import copy

import pytest
import torch
from torch import nn

from pyparallel.pipeline.runtime.preserve_state import preserving_state


class Careless(nn.Module):
    """A module that changes all its state."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("set", None)
        self.register_buffer("temporary", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.written += 1
        self.temporary += 1
        self.replaced = self.replaced + 1
        self.set = torch.ones(1)
        self.register_buffer("added", torch.ones(1))
        self.eval()
        return (self.w * x).sum() + torch.rand(())


def test_all_state_is_restored():
    module = nn.Sequential(nn.BatchNorm1d(3), Careless())
    module(torch.randn(4, 3)).backward()
    module = nn.Sequential(module[0].train(), Careless())
    module[0].eval()
    state = copy.deepcopy(module.state_dict())
    temporary = module[1].temporary.clone()
    gradients = [parameter.grad for parameter in module.parameters()]
    contents = [None if each is None else each.clone() for each in gradients]
    assert {each is None for each in gradients} == {True, False}
    buffers = dict(module.named_buffers())
    random = torch.get_rng_state()
    with preserving_state(module):
        assert all(parameter.grad is None for parameter in module.parameters())
        module[0].train()
        module(torch.randn(4, 3)).backward()
        assert module[1].written.sum() == 3
        assert not module[1].training
    assert dict(module.named_buffers()).keys() == buffers.keys()
    assert all(module.get_buffer(name) is buffer for name, buffer in buffers.items())
    after = module.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert torch.equal(module[1].temporary, temporary)
    for parameter, gradient, content in zip(module.parameters(), gradients, contents, strict=True):
        assert parameter.grad is gradient
        assert content is None or torch.equal(gradient, content)
    assert [each.training for each in module] == [False, True]
    assert torch.equal(torch.get_rng_state(), random)


def fail_on_trial(module):
    with preserving_state([module]):
        module(torch.ones(3)).backward()
        raise TypeError("mine")


def test_all_state_is_restored_after_an_error():
    module = Careless()
    with pytest.raises(TypeError, match="mine"):
        fail_on_trial(module)
    assert module.w.grad is None
    assert module.written.sum() == 0
    assert module.training
