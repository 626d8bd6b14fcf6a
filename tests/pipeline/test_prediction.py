"""What every schedule answers when it is asked for a stage's foresight."""

from functools import partial

import pytest
from torch.optim import SGD, Adadelta

from pyparallel.pipeline import (
    Displacement,
    Layout,
    PipeOptim,
    Rollout,
    SpecTrain,
    Unpredicted,
    XPipe,
)
from tests.pipeline.foresights import OneStage, assert_equal, gradients_of
from tests.pipeline.schedules import EVERY_SCHEDULE


def test_without_a_prediction_any_optimizer_takes_its_own_steps():
    stage = OneStage(partial(Adadelta, lr=0.1), Unpredicted())
    twin = stage.twin()
    gradients = gradients_of(stage)
    stage.step(gradients)
    assert_equal(stage.values(), twin.step(gradients))


def test_without_a_prediction_nothing_is_predicted_and_no_step_taken():
    stage = OneStage(partial(SGD, lr=0.1), Unpredicted())
    before = stage.values()
    with pytest.raises(RuntimeError, match=r"predicts no weights, got a horizon of 2"):
        stage.predicted(2)
    with pytest.raises(RuntimeError, match=r"predicts no weights, got a horizon of 3"):
        stage.step(gradients_of(stage), 3, stage.outputs())
    assert_equal(stage.values(), before)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE, ids=repr)
def test_every_schedule_steps_a_stage_as_its_optimizer_does_where_nothing_is_late(schedule):
    stage = OneStage(partial(SGD, lr=0.1, momentum=0.9), schedule.prediction)
    twin = stage.twin()
    foresight = schedule.foresight(Layout(4, 2, 4), 3, stage.optimizer, stage.weights)
    for seed in range(2):
        gradients = gradients_of(stage, seed)
        for each, gradient in zip(stage.parameters, gradients, strict=True):
            each.grad = gradient
        foresight.step()
        assert_equal(stage.values(), twin.step(gradients))


@pytest.mark.parametrize("kind", [PipeOptim, XPipe, SpecTrain])
def test_the_choice_is_part_of_what_a_schedule_is(kind):
    assert kind().prediction == Displacement()
    chosen = kind(prediction=Rollout(0.5))
    assert chosen != kind()
    assert repr(chosen).endswith("prediction=Rollout(persistence=0.5))")
