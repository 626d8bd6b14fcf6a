"""PipeMare's rules: steps at another learning rate, and earlier weights from the average change."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from pyparallel.pipeline import Displacement
from pyparallel.pipeline.prediction.pipemare import DiscrepancyCorrected, LRRescheduled
from tests.pipeline.prediction.predictors import (
    OneStage,
    assert_close,
    assert_equal,
    assert_resumes_bitwise,
    gradients_of,
)


class Doubling(OneStage):
    """Steps at 1/8, 1/4, 1/2, 1, 1, ... of the learning rate."""

    def __init__(self, make, groups=({},)):
        super().__init__(make, Displacement(), groups)
        self.predictor = LRRescheduled(
            self.predictor, self.optimizer, lambda update: 2.0 ** min(0, update - 3)
        )


MAKERS = [partial(SGD, lr=0.5), partial(SGD, lr=torch.tensor(0.5)), partial(AdamW, lr=0.5)]


@pytest.mark.parametrize("make", MAKERS, ids=str)
def test_each_update_scales_the_rate_of_every_group(make):
    stage = Doubling(make, [{}, {"lr": 0.25}])
    rates = [group["lr"] for group in stage.optimizer.param_groups]
    twin = stage.twin()
    for update in range(5):
        gradients = gradients_of(stage, update)
        for group, rate in zip(twin.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * 2.0 ** min(0, update - 3)
        stage.step(gradients)
        assert_equal(stage.values(), twin.step(gradients))
        for group, rate in zip(stage.optimizer.param_groups, rates, strict=True):
            assert group["lr"] is rate


def test_an_lr_scheduler_is_not_disturbed():
    stage = Doubling(MAKERS[0])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stage.optimizer, 0.5)
    moves = []
    for _ in range(4):
        before = stage.values()[0]
        stage.step([torch.ones_like(each) for each in stage.parameters])
        moves.append((before - stage.values()[0]).mean().item())
        scheduler.step()
    assert moves == pytest.approx([0.0625] * 4, rel=1e-5)


def test_the_rate_is_restored_if_the_step_fails():
    stage = Doubling(MAKERS[0])
    stage.parameters[0].grad = torch.ones(7, 5)

    def fail(*_):
        raise ZeroDivisionError

    stage.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        stage.predictor.step()
    assert stage.optimizer.param_groups[0]["lr"] == 0.5
    assert "updates" not in stage.optimizer.param_groups[0]


def test_the_count_is_saved_with_the_optimizer():
    assert_resumes_bitwise(partial(Doubling, MAKERS[0]))


class Corrected(OneStage):
    def __init__(self, make, decay=0.5, groups=({},), dtypes=(torch.float32,)):
        super().__init__(make, Displacement(), groups, dtypes)
        self.predictor = DiscrepancyCorrected(self.predictor, self.optimizer, self.weights, decay)


@pytest.mark.parametrize("make", [partial(SGD, lr=0.1), partial(Adam, lr=0.1)])
def test_constant_changes_are_undone_exactly(make):
    stage = Corrected(make)
    gradients = gradients_of(stage)
    trail = []
    for _ in range(30):
        trail.append(stage.values())
        stage.step(gradients)
    for back in (1, 2, 5):
        assert_close(stage.predicted(-back), trail[-back], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_saved_with_the_optimizer(dtype):
    build = partial(Corrected, partial(Adam, lr=0.1), dtypes=[dtype])
    assert_resumes_bitwise(build, horizon=-2)
