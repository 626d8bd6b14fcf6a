"""The rollout of the momentum, against further steps of torch's SGD."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam

from pyparallel.pipeline import Rollout
from tests.pipeline.prediction.predictors import OneStage, assert_close, assert_equal, gradients_of

MAKERS = [
    partial(SGD, lr=0.1),
    partial(SGD, lr=0.1, momentum=0.9),
    partial(SGD, lr=0.1, momentum=0.9, maximize=True),
    partial(SGD, lr=0.1, momentum=0.9, dampening=0.4),
    partial(SGD, lr=torch.tensor(0.1), momentum=0.9, nesterov=True),
    partial(SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    partial(SGD, lr=0.1, momentum=1.0),
]


def test_without_persistence_the_momentum_decays(subtests):
    for make in MAKERS:
        for horizon in [1, 3]:
            with subtests.test(make=make, horizon=horizon):
                stage = OneStage(make, Rollout(persistence=0))
                nothing = [torch.zeros_like(each) for each in stage.parameters]
                for seed in range(3):
                    stage.step(gradients_of(stage, seed))
                    expected = stage.twin().step(nothing, horizon)
                    assert_close(stage.predicted(horizon), expected, rtol=1e-5, atol=2e-6)


def test_gradients_may_persist_in_part():
    stage = OneStage(MAKERS[3], Rollout(persistence=0.25))
    gradients = gradients_of(stage)
    stage.step(gradients)
    expected = stage.twin().step([each / 4 for each in gradients], 4)
    assert_close(stage.predicted(4), expected, rtol=1e-5, atol=2e-6)


def test_in_bfloat16_it_rounds_once():
    stage = OneStage(MAKERS[1], Rollout(), dtypes=[torch.bfloat16])
    gradients = gradients_of(stage)
    for _ in range(2):
        stage.step(gradients)
    expected = [
        (now.float() - 0.1 * ((0.9 + 0.81) * velocity.float() + (1 + 1.9) * gradient.float()))
        for now, velocity, gradient in zip(
            stage.values(),
            [stage.optimizer.state[each]["momentum_buffer"] for each in stage.parameters],
            gradients,
            strict=True,
        )
    ]
    assert_equal(stage.predicted(2), [each.bfloat16() for each in expected])


def test_other_optimizers_are_refused():
    sentence = r"^optimizer must be torch.optim.SGD for Rollout, got Adam; use Displacement\(\)$"
    with pytest.raises(ValueError, match=sentence):
        OneStage(partial(Adam, lr=0.1), Rollout())


@pytest.mark.parametrize("persistence", [-0.1, 1.5, float("nan")])
def test_a_persistence_out_of_range_is_refused(persistence):
    with pytest.raises(ValueError, match=r"^persistence must be from 0 to 1, got"):
        Rollout(persistence)
