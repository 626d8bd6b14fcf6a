"""Adam and AdamW against torch's."""

from itertools import product

import pytest
import torch

import pyparallel.optim
from pyparallel.optim import Adam, AdamW
from tests.optim.pairs import Pair, errors_of_single_steps, make_parameters

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
NAMES = ("Adam", "AdamW")
FUSED = {"fused": True}


def test_a_float32_step_is_within_ulps_of_torchs_and_of_float64():
    for name, decay, fused in product(NAMES, (0.0, 0.1), (True, False)):
        options = {"lr": 1e-2, "weight_decay": decay, "maximize": fused}
        errors = errors_of_single_steps(name, FLOAT, torch_options={"fused": fused}, **options)
        assert errors["parameter"] <= 4, (name, options, errors)
        assert errors["exp_avg"] <= 2, (name, options, errors)
        assert errors["exp_avg_sq"] <= 4, (name, options, errors)
        assert errors["step"] == 0
        errors = errors_of_single_steps(name, FLOAT, torch_dtype=torch.float64, **options)
        assert max(errors.values()) <= 5, (name, options, errors)


def test_a_16_bit_step_is_torchs_fused_one_and_rounds_correctly():
    for name, dtype, decay in product(NAMES, (BFLOAT, HALF), (0.0, 0.1)):
        options = {"lr": 1e-2, "weight_decay": decay}
        errors = errors_of_single_steps(name, dtype, torch_options=FUSED, **options)
        assert max(errors.values()) <= 1, (name, dtype, errors)  # a tie; nearly all are equal
        errors = errors_of_single_steps(name, dtype, torch_dtype=torch.float64, **options)
        assert max(errors.values()) <= 0.51, (name, dtype, errors)


def test_options_agree_with_torch():
    for name in NAMES:
        for options in (
            {"betas": (0.0, 0.5)},
            {"eps": 1e-3, "weight_decay": 0.3},
            {"maximize": True, "weight_decay": 0.3},
            {"lr": torch.tensor(1e-2)},
            {"lr": torch.tensor([1e-2]), "betas": (torch.tensor(0.8), torch.tensor(0.9))},
        ):
            pair = Pair(name, **options)
            pair.step(times=5)
            pair.check()
    pair = Pair("Adam", decoupled_weight_decay=True, weight_decay=0.5)
    pair.step(times=3)
    pair.check()


def test_steps_are_counted_for_each_parameter():
    for name in NAMES:
        pair = Pair(name, lr=1e-2)
        for missing in ((), (0, 3), (1, 2, 3), range(5), (4,), (), (2,), ()):
            pair.step(missing)
            pair.check()
        assert {float(state["step"]) for state in pair.ours.state.values()} == {5, 6}


def test_an_edited_step_count_is_used():
    pair = Pair("Adam", lr=1e-2)
    pair.step(times=3)
    for (own, other), count in zip(pair.parameters(), (0, 7, 7, 1000, 3), strict=True):
        pair.ours.state[own]["step"].fill_(count)
        pair.theirs.state[other]["step"].fill_(count)
    pair.step(times=2)
    pair.check()


def test_betas_cycle_with_one_cycle_lr():
    for name, lr in product(NAMES, (1e-2, torch.tensor(1e-2))):
        pair = Pair(name, lr=lr)
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=12)
            for each in pair.both
        ]
        for _ in range(12):
            pair.step()
            for each in schedulers:
                each.step()
        pair.check(rtol=1e-5, atol=1e-5)


def test_step_counts_lie_where_torchs_do():
    for options in ({}, {"fused": True}, {"foreach": True}):
        pair = Pair("Adam", torch_options=options)
        ours = Adam(pair.ours.param_groups[0]["params"], **options)
        pair.ours = ours
        pair.step()
        for own, other in pair.parameters():
            mine, state = ours.state[own]["step"], pair.theirs.state[other]["step"]
            assert (mine.dtype, mine.device, mine.shape) == (state.dtype, state.device, state.shape)
    capturable = Adam(make_parameters(), capturable=True)
    parameter = capturable.param_groups[0]["params"][0]
    parameter.grad = torch.ones_like(parameter)
    capturable.step()
    assert float(capturable.state[parameter]["step"]) == 1


def test_signature_is_torchs():
    for name in NAMES:
        own, other = getattr(pyparallel.optim, name), getattr(torch.optim, name)
        assert own(make_parameters()).defaults == other(make_parameters()).defaults


def test_arguments_out_of_range_are_refused():
    for options in (
        {"lr": -1.0},
        {"eps": -1.0},
        {"weight_decay": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"lr": torch.ones(2)},
        {"lr": float("nan")},
    ):
        for cls in (Adam, AdamW):
            with pytest.raises(ValueError, match="must"):
                cls(make_parameters(), **options)
    with pytest.raises(RuntimeError, match="foreach and fused"):
        Adam(make_parameters(), foreach=True, fused=True)
