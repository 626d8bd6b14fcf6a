"""Earlier weights, estimated from the average of their changes."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam

from pyparallel.pipeline import Displacement
from pyparallel.pipeline.prediction.pipemare import DiscrepancyCorrected
from tests.pipeline.prediction.predictors import (
    OneStage,
    assert_close,
    assert_resumes_bitwise,
    gradients_of,
)


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
