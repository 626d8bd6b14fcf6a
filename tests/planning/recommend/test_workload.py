"""The workload of a step: the user's model, or a transformer of a given size."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from pyparallel.planning.recommend.workload import load, transformer


@pytest.fixture(autouse=True)
def models(monkeypatch):
    module = ModuleType("my_models")
    frozen = nn.Linear(2, 2).requires_grad_(False)
    linear = nn.Sequential(nn.Linear(4, 3), frozen, nn.Linear(3, 1))
    module.good = lambda: (linear, torch.ones(5, 4), lambda m, x: m[2](m[0](x)).mean())
    module.two = lambda: (linear, torch.ones(5, 4))
    module.frozen = lambda: (frozen, None, None)
    monkeypatch.setitem(sys.modules, "my_models", module)


def test_the_users_model_is_timed_and_keeps_gradients():
    workload = load("my_models:good")
    assert workload.num_bytes == 4 * (4 * 3 + 3 + 3 + 1)
    compute = workload.measure(3)
    assert compute.computing > 0
    assert 0 < compute.forward_share < 1
    assert all(parameter.grad is not None for _, parameter in workload.named_parameters)


BAD_PATHS = [
    ("my_models", "--model must be package.module:function, got my_models"),
    ("no_such_models:good", "that can be imported, got no_such_models:good"),
    ("my_models:best", "that can be imported, got my_models:best"),
    ("my_models:two", r"returns \(module, batch, loss\), got my_models:two that returned tuple"),
    ("my_models:frozen", "parameters that require gradients, my_models:frozen has none"),
]


def test_what_is_not_a_model_is_refused_in_one_sentence(subtests):
    for path, sentence in BAD_PATHS:
        with subtests.test(path=path, sentence=sentence), pytest.raises(ValueError, match=sentence):
            load(path)


@pytest.mark.parametrize("num_parameters", [8e4, 1e6, 8e6])
def test_a_transformer_has_about_the_given_size(num_parameters):
    workload = transformer(num_parameters, 1, 8, torch.device("cpu"))
    assert workload.num_bytes / 4 == pytest.approx(num_parameters, rel=0.3)
    loss = workload.loss(workload.module, workload.batch)
    assert loss.shape == ()


BAD_SIZES = [
    ((0.0, 1, 8), "--parameters must be at least 1, got 0"),
    ((float("inf"), 1, 8), "--parameters must be at least 1, got inf"),
    ((float("nan"), 1, 8), "--parameters must be at least 1, got nan"),
    ((1e5, 0, 8), "--batch must be at least 1, got 0"),
    ((1e5, 1, -3), "--length must be at least 1, got -3"),
]


def test_impossible_sizes_are_refused(subtests):
    for sizes, sentence in BAD_SIZES:
        with (
            subtests.test(sizes=sizes, sentence=sentence),
            pytest.raises(ValueError, match=sentence),
        ):
            transformer(*sizes, torch.device("cpu"))
