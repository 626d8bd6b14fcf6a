"""The ranks of a trainer compute what the reference computes in one process."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from pyparallel.pipeline import LastUpdate, PipelineShape, Rollout, Schedule
from tests.cases import slow_unless
from tests.pipeline import reference
from tests.pipeline.every_schedule import FLUSHING, run
from tests.pipeline.jobs import (
    CASES_OF,
    EXACT,
    OTHER_CASES_OF,
    ROLLING,
    Case,
    Size,
    Trained,
    roll_downhill,
    train_case,
    train_on,
    train_sequentially,
    train_with_exact_predictions,
)
from tests.pipeline.models import OPTIMIZERS, smooth_muon
from tests.pipeline.reference import microbatches_per_update, train_plainly


@cache
@smooth_muon()
def expected(case: Case, num_stages: int) -> reference.Trained:
    return reference.train_in_one_process(
        case.layers,
        case.split(num_stages),
        mse_loss,
        OPTIMIZERS[case.optimizer],
        case.schedule,
        case.streams,
        case.num_microbatches,
        prediction_of(case.schedule),
        case.correction,
        case.rates,
        case.max_norm,
    )


def prediction_of(schedule: Schedule) -> reference.Prediction:
    if isinstance(schedule.prediction, Rollout):
        return partial(reference.roll_out, schedule.prediction.persistence)
    if isinstance(schedule.prediction, LastUpdate):
        return reference.repeat_last_update
    return reference.predict


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@smooth_muon()
def check(size: Size, case: Case, found: Trained) -> None:
    wanted = expected(case, size[0])
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[case.dtype]
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance, nan_ok=case.skips)
    exact = case.is_plain and case.dtype == torch.float32
    tolerance = 0 if exact else tolerance
    torch.testing.assert_close(found.state, wanted.state, rtol=tolerance, atol=tolerance)
    (tracked,) = (each for name, each in found.state.items() if name.endswith("batches_tracked"))
    assert tracked == 4 * case.num_microbatches  # each of them once
    shape = PipelineShape(size[0], case.num_microbatches, size[1])
    of_step = case.num_microbatches // case.schedule.microbatches_per_update(shape)
    streams = (case.schedule, 3), (case.schedule.after(3 * of_step), 1)
    runs = [run(schedule, shape, steps).weights.copies for schedule, steps in streams]
    copies = np.maximum(*runs).tolist()
    for index, stage in enumerate(reference.cut(case.layers(), case.split(size[0]))):
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            copies[index] = 1
    assert found.copies == dict(enumerate(copies))
    alone = size == (1, 1) and case.max_norm is None
    if alone or (size[0] == 4 and case.schedule in FLUSHING and not case.backend):
        plain = train_plainly(
            case.layers,
            mse_loss,
            OPTIMIZERS[case.optimizer],
            case.streams,
            case.num_microbatches,
            update_each=microbatches_per_update(case.schedule, case.num_microbatches) == 1,
        )
        assert_same(found.state, plain.state_dict())


@pytest.mark.parametrize(
    "size",
    slow_unless([(2, 2), (4, 2), (4, 4), (8, 1)], [*CASES_OF]),
    ids="{0[0]} stages, {0[1]} ranks".format,
)
def test_every_schedule_trains_like_its_reference(size, ranks, subtests):
    for case, found in zip(
        CASES_OF[size], train_on(ranks, size, train_case, CASES_OF[size]), strict=True
    ):
        with subtests.test(case=str(case)):
            check(size, case, found)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("size", OTHER_CASES_OF, ids="{0[0]} stages, {0[1]} ranks".format)
def test_every_other_case(size, ranks, subtests):
    cases = OTHER_CASES_OF[size]
    for case, found in zip(cases, train_on(ranks, size, train_case, cases), strict=True):
        with subtests.test(case=str(case)):
            check(size, case, found)


def test_exact_predictions_equal_sequential_training(subtests):
    for schedule in EXACT:
        with subtests.test(schedule=schedule):
            found = train_with_exact_predictions(schedule, 4)
            truth = train_sequentially(schedule)
            assert found.losses == pytest.approx(truth.losses, rel=1e-15)
            assert_same(found.state, truth.state)


def test_prediction_converges_where_plain_asynchrony_diverges():
    naive, predicted = (roll_downhill(schedule, 4).losses for schedule in ROLLING)
    assert naive[-1] > 10 * naive[0]
    assert predicted[-1] < 0.1 * predicted[0]
