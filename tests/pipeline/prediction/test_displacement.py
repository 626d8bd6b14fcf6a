"""Prediction by the optimizers' own rules, against further steps of torch's optimizers."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop

from pyparallel.pipeline import Displacement
from pyparallel.training import FlatBuckets
from tests.pipeline.models import Lion, lion_of
from tests.pipeline.prediction.predictors import (
    SHAPES,
    OneStage,
    assert_close,
    assert_equal,
    gradients_of,
)
from tests.pipeline.prediction.test_last_update import MATRICES, Subclass
from tests.pipeline.reference import next_nadam_steps

EXACT = [
    partial(SGD, lr=0.1),
    partial(SGD, lr=0.1, maximize=True),
    partial(SGD, lr=torch.tensor(0.1)),
    partial(SGD, lr=0.1, fused=True),
    partial(Adam, lr=1e-2),
    partial(Adam, lr=1e-2, maximize=True),
    partial(Adam, lr=1e-2, amsgrad=True),
    partial(Adam, lr=torch.tensor(1e-2), betas=(0.0, 0.9)),
    partial(AdamW, lr=1e-2, weight_decay=0),
    partial(AdamW, lr=1e-2, weight_decay=0, fused=True),
    partial(Adam, lr=1e-2, foreach=True),
]
NADAM = [  # exact too, but not linear in the horizon
    partial(NAdam, lr=1e-2),
    partial(NAdam, lr=torch.tensor(1e-2), foreach=True),
    partial(NAdam, lr=1e-2, momentum_decay=0.5, maximize=True),
    partial(NAdam, lr=1e-2, momentum_decay=0.0, betas=(0.5, 0.9)),
    partial(NAdam, lr=1e-2, betas=(0.0, 0.9)),
    partial(NAdam, lr=1e-2, decoupled_weight_decay=True),
]


def name(make):
    options = ",".join(f"{key}={value}" for key, value in make.keywords.items())
    return f"{make.func.__name__}-{options}"


MOMENTUM = [
    partial(SGD, lr=0.1, momentum=0.9),
    partial(SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    partial(SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    partial(SGD, lr=0.1, momentum=0.9, maximize=True, fused=True),
    partial(RMSprop, lr=0.01, momentum=0.9),
    partial(RMSprop, lr=0.01, momentum=0.9, centered=True, weight_decay=0.1),
]


def test_with_momentum_it_follows_the_momentum_buffer(subtests):
    for make in MOMENTUM:
        with subtests.test(make=make):
            stage = OneStage(make, Displacement())
            for seed in range(3):
                stage.step(gradients_of(stage, seed))
            velocities = [
                stage.optimizer.state[each]["momentum_buffer"] for each in stage.parameters
            ]
            lr = stage.optimizer.param_groups[0]["lr"]
            for horizon in (1, 4):
                expected = [
                    p - lr * horizon * v for p, v in zip(stage.values(), velocities, strict=True)
                ]
                assert_close(stage.predicted(horizon), expected, rtol=1e-6, atol=1e-6)


WITHOUT_MOMENTUM = [
    partial(SGD, lr=0.1, weight_decay=0.5),
    partial(RMSprop, lr=0.01, alpha=0.5, eps=0.1, weight_decay=0.1),
    partial(RMSprop, lr=0.01, alpha=0.5, centered=True, eps=0.1, weight_decay=0.1),
]


def test_without_momentum_its_last_step_is_repeated_with_its_decay(subtests):
    for make in WITHOUT_MOMENTUM:
        with subtests.test(make=make):
            stage = OneStage(make, Displacement())
            stage.step(gradients_of(stage, 0))
            before = stage.values()
            stage.step(gradients_of(stage, 1))
            expected = [p + 3 * (p - q) for p, q in zip(stage.values(), before, strict=True)]
            assert_close(stage.predicted(3), expected, rtol=1e-4, atol=2e-6)


def test_rmsprop_is_exact_once_its_average_has_converged():
    stage = OneStage(partial(RMSprop, lr=0.01, alpha=0.5), Displacement())
    gradients = gradients_of(stage)
    for _ in range(30):
        stage.step(gradients)
    expected = stage.twin().step(gradients, 3)
    assert_close(stage.predicted(3), expected, rtol=1e-5, atol=2e-6)


def test_decoupled_decay_is_not_predicted():
    plain, decayed = (
        OneStage(partial(AdamW, lr=0.01, weight_decay=decay), Displacement()) for decay in (0, 0.5)
    )
    for stage in (plain, decayed):
        stage.step(gradients_of(plain))
    moves = [
        [a - b for a, b in zip(stage.predicted(3), stage.values(), strict=True)]
        for stage in (plain, decayed)
    ]
    assert_close(*moves, rtol=1e-4, atol=1e-6)


DECAYED = [
    partial(NAdam, lr=1e-2, weight_decay=0.5),
    partial(NAdam, lr=1e-2, weight_decay=0.5, decoupled_weight_decay=True),
]


def test_nadam_follows_its_momentum_schedule(subtests):
    for make in [*NADAM, *DECAYED]:
        with subtests.test(make=make):
            stage = OneStage(make, Displacement())
            for seed in range(3):
                gradients = gradients_of(stage, seed)
                gradients[0] = None if seed == 1 else gradients[0]  # a step fewer
                stage.step(gradients)
            (group,) = stage.optimizer.param_groups
            for horizon in (1, 4):
                expected = [
                    p - group["lr"] * next_nadam_steps(horizon, group, stage.optimizer.state[p])
                    for p in stage.parameters
                ]
                assert_close(stage.predicted(horizon), expected, rtol=1e-5, atol=2e-6)


def test_groups_have_their_own_options_and_dtypes_their_own_buffers():
    rates = [0.1, 0.3, 0.0]
    groups = [{"lr": rates[0]}, {"lr": rates[1], "momentum": 0.5}, {"lr": rates[2]}]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    stage = OneStage(partial(SGD, lr=1.0), Displacement(), groups, dtypes)
    assert len(stage.buffers) == 9
    first, second = (gradients_of(stage, seed) for seed in range(2))
    stage.step(first)
    stage.step(second)
    expected = []
    for index, now in enumerate(stage.values()):
        group = index // len(SHAPES)
        velocity = second[index].float()
        if group == 1:
            velocity += 0.5 * first[index].float()
        expected.append((now.float() - rates[group] * 2 * velocity).to(now.dtype))
    assert_close(stage.predicted(2), expected, rtol=2**-7, atol=2**-7)
    unmoved = 2 * len(SHAPES)
    assert_equal(stage.predicted(2)[unmoved:], stage.values()[unmoved:])


@pytest.mark.parametrize("make", [partial(SGD, lr=0.1), partial(AdamW, lr=0.01)], ids=name)
def test_the_prediction_can_be_written_in_bfloat16(make):
    stage = OneStage(make, Displacement())
    stage.step(gradients_of(stage))
    exact = stage.predicted(2)
    assert_equal(stage.predicted(2, torch.bfloat16), [each.bfloat16() for each in exact])


@pytest.mark.parametrize("make", [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.01)])
def test_the_learning_rate_is_that_of_the_next_steps(make):
    stage = OneStage(make, Displacement())
    scheduler = torch.optim.lr_scheduler.StepLR(stage.optimizer, step_size=1, gamma=0.5)
    stage.step(gradients_of(stage))
    now, before = stage.values(), stage.predicted(2)
    scheduler.step()
    expected = [p + (q - p) / 2 for p, q in zip(now, before, strict=True)]
    assert_close(stage.predicted(2), expected, rtol=1e-5, atol=1e-6)


class Signed(Optimizer):
    """Steps by the sign of an average, and has its own prediction rule."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    state["average"] = state.get("average", 0) + each.grad
                    each.sub_(state["average"].sign(), alpha=group["lr"])

    def displacement(self, parameter, state, group, horizon):
        return -group["lr"] * horizon * state["average"].sign()


class Beside:
    """The same rule as a separate object."""

    def displacement(self, parameter, state, group, horizon):
        return torch.full_like(parameter, -group["lr"] * horizon)


def test_an_optimizer_can_have_its_own_rule():
    stage = OneStage(partial(Signed, lr=0.25), Displacement(), [{}, {"lr": 0.5}])
    assert_equal(stage.predicted(3), stage.values())
    gradients = gradients_of(stage)
    gradients[1] = None
    out = stage.outputs()
    stage.step(gradients, 3, out)
    expected = stage.twin().step(gradients, 3)
    assert_close(stage.predicted(3), expected)
    assert_equal(stage.parts(out), stage.predicted(3))


class MyMuon(Muon):
    pass


UNKNOWN = [Adadelta, Subclass, MyMuon, Lion, lion_of("my.lion")]


@pytest.mark.parametrize("make", [partial(each, lr=0.1) for each in UNKNOWN], ids=name)
def test_an_optimizer_without_a_rule_is_refused(make):
    sentence = (
        r"be of pyparallel.optim, or torch's SGD, Adam, AdamW, NAdam, RMSprop or Muon, or Lion of "
        r"lion-pytorch or timm, or have a method displacement\(parameter, state, group, horizon\), "
        r"got .*(Adadelta|Subclass|MyMuon|Lion); add the method, pass an object that has it as "
        r"prediction=Displacement\(rule\), or pass prediction=LastUpdate\(\), which repeats the "
        r"last update of any optimizer$"
    )
    with pytest.raises(ValueError, match=sentence):
        OneStage(make, Displacement(), shapes=MATRICES)


def test_a_rule_of_another_shape_is_refused():
    class Wrong(Beside):
        def displacement(self, parameter, state, group, horizon):
            return torch.zeros(2)

    stage = OneStage(partial(Adam, lr=0.1), Displacement(Wrong()), shapes=[(3,)])
    stage.step(gradients_of(stage))
    sentence = r"^Wrong.displacement must return .* shape \[3\], got \[2\]$"
    with pytest.raises(ValueError, match=sentence):
        stage.predicted(1)


def test_its_repr_has_no_address():
    assert repr(Displacement()) == "Displacement()"
    assert repr(Displacement(Beside())) == "Displacement(Beside())"


def test_channels_last_parameters_are_predicted_in_the_weights_layout():
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = Adam(module.parameters(), lr=0.01)
    weights = FlatBuckets(module.parameters(), 1 << 62)
    predictor = Displacement().attach(optimizer, [weights])
    for each in module.parameters():
        each.grad = torch.randn_like(each)
    predictor.step()
    out = [torch.zeros_like(each) for each in weights.buffers]
    predictor.predict(2, out)
    predictor.step()
    predictor.step()
    assert_close(weights.views(out), list(module.parameters()), rtol=1e-5, atol=2e-6)
