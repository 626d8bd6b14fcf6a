"""Profiling of layers, without side effects."""

import copy

import pytest
import torch
from torch import nn

from pyparallel.pipeline.partition.profile import profile_layers
from tests.pipeline.clock import Clock, Takes


class Falters(Takes):
    """Takes far longer in some runs."""

    def take(self, which):
        super().take(which)
        self.clock.now += 50 if self.runs in {3, 8} else 0


def test_the_warm_up_is_not_timed(monkeypatch):
    clock = Clock()
    clock.install(monkeypatch)
    costs = profile_layers([Takes(clock, 1, 2), nn.ReLU(), Takes(clock, 3, 0.5)], torch.ones(3))
    assert [(c.forward, c.backward, c.seconds) for c in costs] == [
        (1, 2, 3),
        (0, 0, 0),
        (3, 0.5, 3.5),
    ]


def test_seconds_are_the_median(monkeypatch):
    clock = Clock()
    clock.install(monkeypatch)
    costs = profile_layers([Falters(clock, 1, 2)], torch.ones(3), repeats=3)
    assert (costs[0].forward, costs[0].backward) == (1, 2)


def test_a_real_layer_takes_time():
    costs = profile_layers([nn.Linear(8, 8)], torch.ones(3, 8))
    assert costs[0].forward > 0
    assert costs[0].backward > 0


def test_a_layer_without_gradients_has_no_backward(monkeypatch):
    clock = Clock()
    clock.install(monkeypatch)
    frozen = Takes(clock, 1, 2).requires_grad_(False)
    costs = profile_layers([nn.Flatten(), frozen, Takes(clock, 1, 2), frozen], torch.ones(3, 8))
    assert [cost.backward for cost in costs] == [0, 0, 2, 2]


def test_there_are_no_side_effects():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Flatten()
    )
    layers[1].weight.grad = torch.ones(3)
    layers[2].eval()
    example = torch.randn(4, 2, 8)
    before = copy.deepcopy((layers, example))
    random = torch.get_rng_state()
    with torch.no_grad():
        profile_layers(layers, example)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(example, before[1])
    assert not example.requires_grad
    state, expected = layers.state_dict(), before[0].state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert [each.training for each in layers] == [each.training for each in before[0]]
    gradients = [parameter.grad for parameter in layers.parameters()]
    assert torch.equal(gradients.pop(2), torch.ones(3))
    assert gradients == [None] * 3


def test_the_gradient_of_the_input_is_computed_as_in_training():
    wanted = []

    class Asks(nn.Module):
        def forward(self, x):
            wanted.append(x.requires_grad)
            return x * 1

    profile_layers([Asks(), nn.Linear(8, 8), Asks()], torch.ones(3, 8), repeats=1)
    assert set(wanted[:2]) == {False}
    assert set(wanted[2:]) == {True}


def test_a_layer_that_fails_is_named():
    sentence = (
        r"^layers\[1\] failed while it was profiled: RuntimeError: .*mat1 and mat2 shapes .*; give "
        r"split=\[...\] to skip the measurement$"
    )
    with pytest.raises(RuntimeError, match=sentence):
        profile_layers([nn.Linear(8, 8), nn.Linear(7, 7)], torch.ones(3, 8))
    sentence = r"^layers\[0\] failed while it was profiled: TypeError: a layer's output must be"
    with pytest.raises(RuntimeError, match=sentence):
        profile_layers([nn.LSTM(8, 8)], torch.ones(3, 8))


def test_lazy_layers_are_refused():
    with pytest.raises(ValueError, match=r"^layers must have initialized parameters, got a lazy "):
        profile_layers([nn.ReLU(), nn.LazyLinear(3)], torch.ones(3, 8))
