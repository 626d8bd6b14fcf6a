"""SGD against torch's."""

from itertools import product

import pytest
import torch

from pyparallel.optim import SGD
from tests.optim.pairs import Pair, errors_of_single_steps, make_parameters

RULES = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3},
)


def test_a_float32_step_is_within_ulps_of_torchs_and_of_float64():
    for rule, decay, fused in product(RULES, (0.0, 0.1), (True, False)):
        options = {"lr": 1e-2, "weight_decay": decay, "maximize": fused, **rule}
        errors = errors_of_single_steps(
            "SGD", torch.float32, torch_options={"fused": fused}, **options
        )
        assert errors["parameter"] <= 4, (options, errors)
        assert errors.get("momentum_buffer", 0) <= 2, (options, errors)
        errors = errors_of_single_steps("SGD", torch.float32, torch_dtype=torch.float64, **options)
        assert max(errors.values()) <= 4, (options, errors)


def test_a_16_bit_step_rounds_correctly():
    """Torch's own fused SGD of 16 bits is wrong on CPUs (2.13 leaves full vectors unstepped)."""
    for dtype, rule, decay in product((torch.bfloat16, torch.float16), RULES, (0.0, 0.1)):
        options = {"lr": 1e-2, "weight_decay": decay, **rule}
        errors = errors_of_single_steps("SGD", dtype, torch_dtype=torch.float64, **options)
        assert max(errors.values()) <= 0.51, (dtype, options, errors)


def test_options_agree_with_torch():
    for rule, options in product(
        RULES,
        (
            {"maximize": True, "weight_decay": 0.1},
            {"lr": torch.tensor(1e-2), "weight_decay": torch.tensor(0.3)},
            {"lr": torch.tensor([1e-2])},
        ),
    ):
        pair = Pair("SGD", **rule, **options)
        pair.step(times=3)
        pair.check()


def test_the_first_gradient_of_each_parameter_is_not_damped():
    for nesterov in (False, True):
        options = {"nesterov": True} if nesterov else {"dampening": 0.3}
        pair = Pair("SGD", lr=1e-2, momentum=0.9, **options)
        for missing in ((0, 2), (0, 2), (2,), range(5), (1,), ()):
            pair.step(missing)
            pair.check()


def test_momentum_comes_and_goes():
    pair = Pair("SGD", lr=1e-2)
    for momentum in (0.0, 0.9, 0.0, 0.5):
        for each in pair.both:
            each.param_groups[0]["momentum"] = momentum
        pair.step(times=2)
        pair.check()
    pair = Pair("SGD", lr=1e-2, momentum=0.9)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=12) for each in pair.both
    ]
    for _ in range(12):
        pair.step()
        for each in schedulers:
            each.step()
    pair.check()


def test_the_last_gradient_is_kept_to_predict_from_it():
    parameters = make_parameters()
    optimizer = SGD(parameters, lr=0.5, weight_decay=0.1)
    optimizer.lay_out()
    with pytest.raises(RuntimeError, match="keeps_last_gradient must be True"):
        optimizer.predict_bucket(0, 1, torch.empty(0))
    optimizer.keeps_last_gradient = True
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    parameters[1].grad = None
    optimizer.step()
    weights = optimizer._weights[0]
    ahead = torch.empty_like(weights.buffers[0])
    optimizer.predict_bucket(0, 2, ahead)
    for index, (p, start, found) in enumerate(
        zip(parameters, before, weights.views([ahead]), strict=True)
    ):
        velocity = 0 if index == 1 else 1 + 0.1 * start
        torch.testing.assert_close(p.detach(), start - 0.5 * velocity)
        torch.testing.assert_close(found, start - 1.5 * velocity)


def test_signature_is_torchs():
    assert SGD(make_parameters()).defaults == torch.optim.SGD(make_parameters()).defaults


def test_arguments_out_of_range_are_refused():
    for options in (
        {"lr": -1.0},
        {"momentum": -1.0},
        {"weight_decay": -1.0},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        {"lr": torch.ones(2)},
    ):
        with pytest.raises(ValueError, match="must"):
            SGD(make_parameters(), **options)
    with pytest.raises(RuntimeError, match="foreach and fused"):
        SGD(make_parameters(), foreach=True, fused=True)
