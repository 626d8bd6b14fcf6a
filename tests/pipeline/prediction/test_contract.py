"""What every prediction does with every optimizer: training goes on as without it, also resumed."""

import copy
from functools import partial

import pytest
import torch
from torch.optim import RMSprop

from pyparallel.pipeline import Displacement, Rollout
from tests.pipeline.prediction import test_displacement, test_last_update, test_rollout
from tests.pipeline.prediction.predictors import (
    SHAPES,
    OneStage,
    assert_close,
    assert_equal,
    assert_resumes_bitwise,
    assert_same_state,
    gradients_of,
)
from tests.pipeline.prediction.test_last_update import in_float32  # noqa: F401

OF_DISPLACEMENT = [
    *test_displacement.EXACT,
    *test_displacement.NADAM,
    *test_displacement.DECAYED,
    *test_displacement.MOMENTUM,
    partial(RMSprop, lr=0.01),
    partial(RMSprop, lr=0.01, centered=True),
]
CASES = [
    *((Displacement(), make, SHAPES) for make in OF_DISPLACEMENT),
    *((Rollout(), make, SHAPES) for make in test_rollout.MAKERS),
    *((*each, test_last_update.MATRICES) for each in test_last_update.CASES),
]


def build(prediction, make, shapes):
    return OneStage(make, prediction, shapes=shapes)


def test_before_the_first_step_the_prediction_is_the_weights(subtests):
    for case in CASES:
        with subtests.test(case=case[:2]):
            stage = build(*case)
            assert_equal(stage.predicted(3), stage.values())
            assert not stage.optimizer.state


def test_training_is_bitwise_that_of_the_optimizer_alone(subtests):
    for case in CASES:
        with subtests.test(case=case[:2]):
            stage, apart = (build(*case) for _ in range(2))
            twin = stage.twin()
            for seed in range(3):
                gradients, out = gradients_of(stage, seed), stage.outputs()
                stage.predicted(2)
                stage.step(gradients, 2, out)
                apart.step(gradients)
                assert_equal(stage.values(), twin.step(gradients))
                before = copy.deepcopy(stage.optimizer.state_dict())
                assert_equal(stage.parts(out), stage.predicted(2))
                assert_equal(stage.parts(out), apart.predicted(2))
                assert_same_state(stage.optimizer.state_dict(), before)
                assert_equal(stage.values(), [each.detach() for each in twin.parameters])


def test_a_parameter_without_gradients_is_not_moved(subtests):
    for case in CASES:
        with subtests.test(case=case[:2]):
            stage = build(*case)
            for seed in range(2):
                stage.step([None, *gradients_of(stage, seed)[1:]])
                assert stage.parameters[0] not in stage.optimizer.state  # none of its own either
                assert_equal(stage.predicted(3)[:1], stage.values()[:1])
                assert not torch.equal(stage.predicted(3)[1], stage.values()[1])


def test_a_loaded_state_predicts_and_trains_bitwise_as_the_saved_one(subtests):
    for case in CASES:
        with subtests.test(case=case[:2]):
            assert_resumes_bitwise(partial(build, *case))


# For constant gradients they are those steps; the tolerance grows with an iteration's rounding.
EXACT = [
    *((Displacement(), make, SHAPES, 2e-6)
      for make in (*test_displacement.EXACT, *test_displacement.NADAM)),
    *((Rollout(), make, SHAPES, 1e-5) for make in test_rollout.MAKERS),
    *((Displacement(), make, test_last_update.MATRICES, 1e-5) for make in test_last_update.EXACT),
]  # fmt: skip


@pytest.mark.usefixtures("in_float32")
def test_constant_gradients_are_predicted_exactly_at_every_step(subtests):
    for prediction, make, shapes, tolerance in EXACT:
        for horizon in (1, 2, 5):
            with subtests.test(prediction=prediction, make=make, horizon=horizon):
                stage = build(prediction, make, shapes)
                gradients = gradients_of(stage)
                for _ in range(4):
                    stage.step(gradients)
                    expected = stage.twin().step(gradients, horizon)
                    assert_close(stage.predicted(horizon), expected, rtol=2e-5, atol=tolerance)
