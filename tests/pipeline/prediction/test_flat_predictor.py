"""One op per flat buffer, except where the step counts of parameters differ."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam

from pyparallel import ops
from pyparallel.pipeline import Displacement
from pyparallel.pipeline.prediction import optimizer_rules as update_rules
from tests.pipeline.prediction.predictors import OneStage, assert_close, assert_equal, gradients_of


@pytest.fixture
def calls(monkeypatch):
    """Lengths of the buffers that predict_adam was called with."""
    lengths = []

    def counted(param, *state, **numbers):
        lengths.append(param.numel())
        return ops.predict_adam(param, *state, **numbers)

    monkeypatch.setattr(update_rules, "predict_adam", counted)
    return lengths


def test_one_op_serves_all_parameters(calls):
    stage = OneStage(partial(Adam, lr=0.01), Displacement(), [{}, {"lr": 0.1}])
    stage.step(gradients_of(stage))
    stage.predicted(2)
    assert calls == [buffer.numel() for buffer in stage.buffers]


def test_parameters_that_missed_a_step_are_predicted_with_their_own_step_count(calls):
    stage = OneStage(partial(Adam, lr=0.01), Displacement())
    gradients = gradients_of(stage)
    stage.step(gradients)
    stage.predicted(1)
    stage.step([None if index == 1 else each for index, each in enumerate(gradients)])
    calls.clear()
    assert_close(stage.predicted(2), stage.twin().step(gradients, 2), rtol=1e-5, atol=2e-6)
    assert len(calls) == 3
    assert sum(calls) == stage.buffers[0].numel()
    stage.step(gradients)
    assert_close(stage.predicted(2), stage.twin().step(gradients, 2), rtol=1e-5, atol=2e-6)


def test_nothing_is_predicted_from_steps_that_were_all_skipped(calls):
    stage = OneStage(partial(Adam, lr=0.01, fused=True), Displacement())
    stage.optimizer.found_inf = torch.ones(())
    stage.step(gradients_of(stage))
    assert_equal(stage.predicted(2), stage.values())
    assert calls


def test_step_counts_are_read_again_after_loading(calls):
    stage = OneStage(partial(Adam, lr=0.01), Displacement())
    gradients = gradients_of(stage)
    stage.step(gradients)
    uneven = stage.twin()
    uneven.step([None, *gradients[1:]])
    stage.predicted(1)
    stage.optimizer.load_state_dict(uneven.optimizer.state_dict())
    calls.clear()
    stage.predicted(2)
    assert len(calls) == 2


def test_the_last_gradient_is_zero_after_a_step_without_one():
    stage = OneStage(partial(SGD, lr=0.1, weight_decay=0.5), Displacement())
    gradients = gradients_of(stage)
    stage.step(gradients)
    stage.step([None, *gradients[1:]])
    assert_equal(stage.predicted(3)[:1], stage.values()[:1])
    stage.step(gradients)
    assert not torch.equal(stage.predicted(3)[0], stage.values()[0])


def test_the_momentum_can_be_switched_on_and_off_in_training():
    stage = OneStage(partial(SGD, lr=0.1), Displacement())
    (group,) = stage.optimizer.param_groups
    gradients = gradients_of(stage)
    for momentum in (0.0, 0.5, 0.0):
        group["momentum"] = momentum
        stage.step(gradients)
        expected = [p - 0.2 * g for p, g in zip(stage.values(), gradients, strict=True)]
        assert_close(stage.predicted(2), expected, rtol=1e-5, atol=1e-6)
