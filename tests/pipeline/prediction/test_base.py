"""The predictor that each schedule attaches to a stage."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, AdamW

from pyparallel.pipeline import (
    Displacement,
    Kind,
    NoPrediction,
    PipelineShape,
    PipeOptim,
    Rollout,
    SpecTrain,
    XPipe,
)
from pyparallel.pipeline.runtime.stage_weights import StageWeights
from pyparallel.training import FlatBuckets
from tests.pipeline.every_schedule import EVERY_SCHEDULE
from tests.pipeline.prediction.predictors import OneStage, assert_close, assert_equal, gradients_of


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


EXACT = [
    (Displacement(), partial(SGD, lr=0.1)),
    (Displacement(), partial(AdamW, lr=0.1, weight_decay=0)),
    (Rollout(), partial(SGD, lr=0.1, momentum=0.9, nesterov=True)),
]


def test_forwards_read_the_future_weights_for_constant_gradients(subtests):
    for prediction, make in EXACT:
        for mode in ["live", "consistent"]:
            with subtests.test(prediction=prediction, mode=mode):
                schedule, shape = PipeOptim(mode, prediction), PipelineShape(4, 12, 4)
                parameter = nn.Parameter(torch.zeros(5))
                optimizer = make([parameter])
                flat = [FlatBuckets([parameter], 1 << 62)]
                predictor = schedule.weight_predictor(shape, 1, optimizer, flat)
                weights = StageWeights(
                    flat, predictor, schedule.versions(shape), 1, lambda each: each
                )
                read, then = [], []
                for action in schedule.rank_actions(shape, rank=1):
                    if action.kind is Kind.FORWARD:
                        with weights.forward(action.microbatch):
                            read.append(parameter.detach().clone())
                    elif action.kind is Kind.BACKWARD:
                        with weights.backward(action.microbatch):
                            then.append(parameter.detach().clone())
                        weights.end_backward(action.microbatch)
                    else:
                        if mode == "consistent":
                            then[-1] = parameter.detach().clone()
                        parameter.grad = torch.full((5,), -2.0)
                        weights.update()
                started = 3  # before the first update nothing is predicted
                assert_close(read[started:], then[started:], rtol=1e-5, atol=1e-6)
                assert then[-1].min() > 0.5
