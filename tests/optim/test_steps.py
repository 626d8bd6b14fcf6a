"""Steps of SGD, Adam and AdamW against torch's."""

from itertools import product

import pytest
import torch

import pyparallel.optim
from pyparallel.optim import SGD, Adam
from tests.cases import pairwise
from tests.optim.pairs import ALL, Pair, errors_of_single_steps, make_parameters

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
ADAMS = ("Adam", "AdamW")
RULES_OF_SGD = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3},
)
RULES = [*(("SGD", rule) for rule in RULES_OF_SGD), ("Adam", {}), ("AdamW", {})]
ULPS = {"parameter": 4, "momentum_buffer": 2, "exp_avg": 2, "exp_avg_sq": 4, "step": 0}


def test_a_float32_step_is_within_ulps_of_torchs_and_of_float64():
    for (name, rule), decay, fused in pairwise(RULES, (0.0, 0.1), (True, False)):
        options = {"lr": 1e-2, "weight_decay": decay, "maximize": fused, **rule}
        errors = errors_of_single_steps(name, FLOAT, torch_options={"fused": fused}, **options)
        assert all(error <= ULPS[key] for key, error in errors.items()), (name, options, errors)
        errors = errors_of_single_steps(name, FLOAT, torch_dtype=torch.float64, **options)
        assert max(errors.values()) <= (4 if name == "SGD" else 5), (name, options, errors)


def test_a_16_bit_step_rounds_correctly_and_is_torchs_fused_one():
    for (name, rule), dtype, decay in pairwise(RULES, (BFLOAT, HALF), (0.0, 0.1)):
        options = {"lr": 1e-2, "weight_decay": decay, **rule}
        errors = errors_of_single_steps(name, dtype, torch_dtype=torch.float64, **options)
        assert max(errors.values()) <= 0.51, (name, dtype, options, errors)
        if name != "SGD":  # torch's of 16 bits is wrong on CPUs: 2.13 leaves full vectors unstepped
            fused = {"fused": True}
            errors = errors_of_single_steps(name, dtype, torch_options=fused, **options)
            assert max(errors.values()) <= 1, (name, dtype, errors)  # a tie; nearly all are equal


OPTIONS_OF_SGD = (
    {"maximize": True, "weight_decay": 0.1},
    {"lr": torch.tensor(1e-2), "weight_decay": torch.tensor(0.3)},
    {"lr": torch.tensor([1e-2])},
)
OPTIONS_OF_ADAM = (
    {"betas": (0.0, 0.5)},
    {"eps": 1e-3, "weight_decay": 0.3},
    {"maximize": True, "weight_decay": 0.3},
    {"lr": torch.tensor(1e-2)},
    {"lr": torch.tensor([1e-2]), "betas": (torch.tensor(0.8), torch.tensor(0.9))},
)


def test_options_agree_with_torch():
    rows = [("SGD", a | b) for a, b in product(RULES_OF_SGD, OPTIONS_OF_SGD)]
    rows += [*product(ADAMS, OPTIONS_OF_ADAM)]
    rows += [("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.5})]
    for name, options in rows:
        pair = Pair(name, **options)
        pair.step(times=5)
        pair.check()


def test_steps_are_counted_and_the_first_gradient_is_undamped_for_each_parameter():
    nesterov, damped = ({"momentum": 0.9, **each} for each in ({"nesterov": True}, RULES[3][1]))
    for name, options in (("SGD", nesterov), ("SGD", damped), ("Adam", {}), ("AdamW", {})):
        pair = Pair(name, lr=1e-2, **options)
        for missing in ((0, 2), (0, 2), (1, 2, 3), range(5), (4,), (1,), (2,), ()):
            pair.step(missing)
            pair.check()
        if name != "SGD":
            counts = [float(state["step"]) for state in pair.ours.state.values()]
            assert sorted(counts) == [3, 5, 5, 6, 6]


def test_an_edited_step_count_is_used():
    pair = Pair("Adam", lr=1e-2)
    pair.step(times=3)
    for (own, other), count in zip(pair.parameters(), (0, 7, 7, 1000, 3), strict=True):
        pair.ours.state[own]["step"].fill_(count)
        pair.theirs.state[other]["step"].fill_(count)
    pair.step(times=2)
    pair.check()


def test_momentum_comes_and_goes():
    pair = Pair("SGD", lr=1e-2)
    for momentum in (0.0, 0.9, 0.0, 0.5):
        for each in pair.both:
            each.param_groups[0]["momentum"] = momentum
        pair.step(times=2)
        pair.check()


def test_momentum_and_betas_cycle_with_one_cycle_lr():
    rows = [*ALL.items(), *((name, {"lr": torch.tensor(1e-2)}) for name in ADAMS)]
    for name, options in rows:
        pair = Pair(name, **{"lr": 1e-2, **options})
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


OF_ADAM = [{"eps": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}]
OUT_OF_RANGE = {
    "SGD": [
        {"momentum": -1.0},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
    ],
    "Adam": OF_ADAM,
    "AdamW": OF_ADAM,
}


def test_constructors_are_torchs():
    of_all = [{"lr": -1.0}, {"weight_decay": -1.0}, {"lr": torch.ones(2)}]
    for name, rows in OUT_OF_RANGE.items():
        own, other = getattr(pyparallel.optim, name), getattr(torch.optim, name)
        assert isinstance(own(make_parameters()), other)
        assert own(make_parameters()).defaults == other(make_parameters()).defaults
        for options in of_all + rows:
            with pytest.raises(ValueError, match=r"Invalid|requires|must be 1-element"):
                own(make_parameters(), **options)
        with pytest.raises(RuntimeError, match="`fused` and `foreach`"):
            own(make_parameters(), foreach=True, fused=True)
