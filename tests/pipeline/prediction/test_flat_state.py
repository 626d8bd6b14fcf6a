"""Optimizer state as views of flat buffers: values, loading and saving."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, NAdam, RMSprop

from pyparallel.pipeline import Displacement, PipelineShape, PipeMare, PipeOptim
from pyparallel.pipeline.prediction.flat_state import FlatState
from pyparallel.training import FlatBuckets
from tests.pipeline.prediction.predictors import (
    OneStage,
    assert_equal,
    assert_same_state,
    gradients_of,
)

MAKERS = [
    partial(SGD, lr=0.1),
    partial(SGD, lr=0.1, momentum=0.9),
    partial(Adam, lr=0.01, amsgrad=True),
    partial(RMSprop, lr=0.01, centered=True),
    partial(NAdam, lr=0.01),
]


def trained(make, dtype=torch.float32):
    stage = OneStage(make, Displacement(), dtypes=[dtype])
    for seed in range(2):
        stage.step(gradients_of(stage, seed))
        stage.predicted(1)
    return stage


def entries_of(stage, name):
    return [stage.optimizer.state[each][name] for each in stage.parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_become_views_of_one_buffer_and_keep_their_values(dtype):
    stage = OneStage(MAKERS[2], Displacement(), dtypes=[dtype])
    stage.step(gradients_of(stage))
    values = [each.clone() for each in entries_of(stage, "exp_avg")]
    flat = FlatState(stage.optimizer, stage.weights[0])
    (buffer,) = flat.buffers("exp_avg")
    assert (buffer.shape, buffer.dtype) == (stage.buffers[0].shape, dtype)
    assert_equal(entries_of(stage, "exp_avg"), values)
    buffer.fill_(3)
    assert all((each == 3).all() for each in entries_of(stage, "exp_avg"))


def test_flat_state_is_not_copied_again():
    stage = trained(MAKERS[1])
    flat = FlatState(stage.optimizer, stage.weights[0])
    (buffer,) = flat.buffers("momentum_buffer")
    stage.optimizer.step()
    assert flat.buffers("momentum_buffer")[0] is buffer
    assert flat.num_changes == len(stage.parameters)


def test_missing_state_is_zero_and_is_not_created():
    stage = OneStage(MAKERS[1], Displacement())
    gradients = gradients_of(stage)
    gradients[0] = None
    stage.step(gradients)
    flat = FlatState(stage.optimizer, stage.weights[0])
    assert not flat.views("momentum_buffer")[0].any()
    assert not FlatState(stage.optimizer, stage.weights[0]).buffers("exp_avg")[0].any()
    assert stage.parameters[0] not in stage.optimizer.state


def test_cleared_state_is_zero():
    stage = trained(MAKERS[1])
    stage.optimizer.state.clear()
    assert_equal(stage.predicted(3), stage.values())
    stage.step([torch.zeros_like(each) for each in stage.parameters])
    assert_equal(stage.predicted(3), stage.values())


def test_state_of_another_dtype_keeps_it():
    stage = trained(MAKERS[1], torch.bfloat16)
    for state in stage.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].float() + 2**-20
    before = entries_of(stage, "momentum_buffer")
    stage.predicted(1)
    assert_equal(entries_of(stage, "momentum_buffer"), before)
    assert entries_of(stage, "momentum_buffer")[0].dtype == torch.float32


def test_a_copy_of_the_state_is_independent(subtests):
    for make in MAKERS:
        with subtests.test(make=make):
            stage = trained(make)
            copied = copy.deepcopy(stage.optimizer.state_dict())
            again = copy.deepcopy(copied)
            stage.step(gradients_of(stage, 9))
            assert_same_state(copied, again)
            stage.optimizer.load_state_dict(copied)
            assert_same_state(stage.optimizer.state_dict(), again)


@pytest.mark.parametrize("schedule", [PipeOptim(), PipeMare(decay=0.5)], ids=repr)
def test_an_unsupported_dtype_is_refused_before_training(schedule):
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer, flat = SGD([parameter], lr=0.1), [FlatBuckets([parameter], 1 << 20)]
    with pytest.raises(
        ValueError,
        match="prediction, be float32, float64, bfloat16 or float16, got complex64",
    ):
        schedule.weight_predictor(PipelineShape(4, 4, 4), 0, optimizer, flat)
