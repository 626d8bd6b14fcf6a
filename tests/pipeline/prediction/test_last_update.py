"""Prediction by the last update, repeated: of any optimizer, Muon and Lion by their own rule."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adadelta, AdamW, Muon

from pyparallel.pipeline import Displacement, LastUpdate
from tests.pipeline.models import LIONS
from tests.pipeline.prediction.predictors import OneStage, assert_close, assert_equal, gradients_of

MATRICES = [(7, 5), (3, 8), (4, 4), (1, 6)]
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic iteration (Jordan et al., 2024)


class Subclass(SGD):
    """Steps twice, unlike SGD."""

    def step(self, closure=None):
        super().step(closure)
        super().step(closure)


MUONS = [
    partial(Muon, lr=0.02),
    partial(Muon, lr=0.02, weight_decay=0.0, nesterov=False),
    partial(Muon, lr=0.02, adjust_lr_fn="match_rms_adamw", momentum=0.5),
]
BY_DISPLACEMENT = [*MUONS, *(partial(each, lr=0.01, weight_decay=0.1) for each in LIONS)]
CASES = [
    *((Displacement(), make) for make in BY_DISPLACEMENT),
    *((LastUpdate(), make) for make in MUONS),
    (LastUpdate(), partial(Adadelta, lr=0.5)),
    (LastUpdate(), partial(Subclass, lr=0.1, momentum=0.9)),
    (LastUpdate(), partial(AdamW, lr=0.01, weight_decay=0.5)),
    (LastUpdate(), partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.5)),
]


def build(prediction, make, **options):
    return OneStage(make, prediction, shapes=MATRICES, **options)


def test_the_last_update_is_repeated_with_its_weight_decay(subtests):
    for prediction, make in CASES:
        with subtests.test(prediction=prediction, make=make):
            stage = build(prediction, make, groups=[{}, {"lr": 0.003}])
            for seed in range(3):
                before = stage.values()
                stage.step(gradients_of(stage, seed))
                for horizon in (1, 4):
                    expected = [
                        now + horizon * (now - last)
                        for now, last in zip(stage.values(), before, strict=True)
                    ]
                    assert_close(stage.predicted(horizon), expected, rtol=1e-6, atol=1e-6)


def newton_schulz(matrix, steps=5):
    """Return a matrix of about its singular vectors alone, in float32."""
    a, b, c = COEFFICIENTS
    wide = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix).clone()
    wide /= wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


@pytest.fixture
def in_float32(monkeypatch):
    """Have torch's Muon iterate in float32, where it is homogeneous but for rounding."""
    name = "torch.optim._muon._zeropower_via_newtonschulz"
    monkeypatch.setattr(name, lambda matrix, *_: newton_schulz(matrix))


@pytest.mark.usefixtures("in_float32")
def test_without_decay_muon_goes_on_by_its_orthogonalized_momentum(subtests):
    adjusted = {
        None: lambda rows, columns: max(1, rows / columns) ** 0.5,
        "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    }
    for adjust, nesterov in [(None, True), (None, False), ("match_rms_adamw", True)]:
        with subtests.test(adjust=adjust, nesterov=nesterov):
            options = {"lr": 0.02, "momentum": 0.8, "adjust_lr_fn": adjust, "nesterov": nesterov}
            stage = build(Displacement(), partial(Muon, weight_decay=0.0, **options))
            momenta = [torch.zeros_like(each) for each in stage.parameters]
            for seed in range(3):
                gradients = gradients_of(stage, seed)
                stage.step(gradients)
                momenta = [0.8 * b + 0.2 * g for b, g in zip(momenta, gradients, strict=True)]
                expected = []
                for now, b, g in zip(stage.values(), momenta, gradients, strict=True):
                    direction = newton_schulz(0.8 * b + 0.2 * g if nesterov else b)
                    expected.append(now - 3 * 0.02 * adjusted[adjust](*now.shape) * direction)
                assert_close(stage.predicted(3), expected, rtol=1e-5, atol=1e-5)


EXACT = [
    *(partial(Muon, lr=0.02, weight_decay=0.0, nesterov=each) for each in (True, False)),
    *(partial(each, lr=0.01) for each in LIONS),
]


def test_in_bfloat16_newton_schulz_differs_by_its_rounding():
    stage = build(Displacement(), EXACT[0])
    gradients = gradients_of(stage)
    for _ in range(4):
        before = stage.values()
        stage.step(gradients)
        moved = max((a - b).abs().max() for a, b in zip(stage.values(), before, strict=True))
        expected = stage.twin().step(gradients, 2)
        assert_close(stage.predicted(2), expected, rtol=0.0, atol=0.2 * float(moved))


def test_a_parameter_without_a_gradient_in_the_last_step_is_not_moved(subtests):
    for prediction, make in CASES:
        with subtests.test(prediction=prediction, make=make):
            stage = build(prediction, make)
            stage.step(gradients_of(stage))
            assert not torch.equal(stage.predicted(3)[0], stage.values()[0])
            stage.step([None, *gradients_of(stage)[1:]])
            assert_equal(stage.predicted(3)[:1], stage.values()[:1])
            assert not torch.equal(stage.predicted(3)[1], stage.values()[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_may_be_of_any_dtype(dtype):
    stage = build(LastUpdate(), partial(SGD, lr=0.25, momentum=0.5), dtypes=[dtype])
    before = stage.values()
    stage.step(gradients_of(stage))
    expected = [now + 2 * (now - last) for now, last in zip(stage.values(), before, strict=True)]
    tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-15
    assert_close(stage.predicted(2), expected, rtol=tolerance, atol=tolerance)
    assert {each.dtype for each in stage.predicted(2)} == {dtype}


def test_only_updates_are_repeated_and_no_other_change_of_the_weights():
    stage = build(LastUpdate(), partial(SGD, lr=0.25, momentum=0.5))
    before = stage.values()
    stage.step(gradients_of(stage))
    updates = [now - last for now, last in zip(stage.values(), before, strict=True)]
    written = gradients_of(stage, 2)
    for each, values in zip(stage.parameters, written, strict=True):
        each.data.copy_(values)
    moved = [values + 3 * update for values, update in zip(written, updates, strict=True)]
    assert_close(stage.predicted(3), moved, rtol=1e-6, atol=1e-6)
    stage.optimizer.register_step_post_hook(fail)
    with pytest.raises(ArithmeticError):
        stage.step(gradients_of(stage))
    assert_equal(stage.predicted(3), stage.values())


def fail(*_):
    raise ArithmeticError
