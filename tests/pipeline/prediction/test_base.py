"""The predictor that each schedule attaches to a stage."""

from functools import partial

import pytest
from torch.optim import SGD, Adadelta

from pyparallel.pipeline import (
    Displacement,
    NoPrediction,
    PipelineShape,
    PipeOptim,
    Rollout,
    SpecTrain,
    XPipe,
)
from tests.pipeline.every_schedule import EVERY_SCHEDULE
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


def test_every_schedule_steps_a_stage_without_staleness_as_its_optimizer(subtests):
    for schedule in EVERY_SCHEDULE:
        with subtests.test(schedule=schedule):
            stage = OneStage(partial(SGD, lr=0.1, momentum=0.9), schedule.prediction)
            twin = stage.twin()
            predictor = schedule.weight_predictor(
                PipelineShape(4, 2, 4), 3, stage.optimizer, stage.weights
            )
            for seed in range(2):
                gradients = gradients_of(stage, seed)
                for each, gradient in zip(stage.parameters, gradients, strict=True):
                    each.grad = gradient
                predictor.step()
                assert_equal(stage.values(), twin.step(gradients))


@pytest.mark.parametrize("kind", [PipeOptim, XPipe, SpecTrain])
def test_schedules_compare_by_their_prediction(kind):
    assert kind().prediction == Displacement()
    chosen = kind(prediction=Rollout(0.5))
    assert chosen != kind()
    assert repr(chosen).endswith("prediction=Rollout(persistence=0.5))")
