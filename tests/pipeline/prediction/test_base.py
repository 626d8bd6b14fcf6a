"""The predictor that each schedule attaches to a stage."""

from functools import partial

import pytest
from torch.optim import SGD, Adadelta

from pyparallel.pipeline import NoPrediction
from tests.pipeline.prediction.predictors import OneStage, assert_equal, gradients_of


def test_without_prediction_any_optimizer_takes_its_own_steps():
    stage = OneStage(partial(Adadelta, lr=0.1), NoPrediction())
    twin = stage.twin()
    gradients = gradients_of(stage)
    stage.step(gradients)
    assert_equal(stage.values(), twin.step(gradients))


def test_without_prediction_a_horizon_is_refused():
    stage = OneStage(partial(SGD, lr=0.1), NoPrediction())
    before = stage.values()
    with pytest.raises(RuntimeError, match=r"^horizon must be 0 without weight prediction, got 2$"):
        stage.predicted(2)
    with pytest.raises(RuntimeError, match=r"^horizon must be 0 without weight prediction, got 3$"):
        stage.step(gradients_of(stage), 3, stage.outputs())
    assert_equal(stage.values(), before)
