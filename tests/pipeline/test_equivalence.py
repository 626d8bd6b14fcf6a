"""The ranks of a trainer compute what the reference computes in one process."""

from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pyparallel.pipeline import (
    GPipe,
    LastUpdate,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipeMare,
    PipeOptim,
    Rollout,
    Schedule,
)
from tests.pipeline import reference
from tests.pipeline.every_schedule import FLUSHING, run
from tests.pipeline.jobs import (
    CASES_OF,
    DEEP,
    EXACT,
    OTHER_CASES_OF,
    ROLLING,
    STILL,
    WATCHED,
    Case,
    Size,
    of_all_ranks,
    of_ranks,
    roll_downhill,
    stand_still,
    train_case,
    train_sequentially,
    train_with_exact_predictions,
    watch,
)
from tests.pipeline.models import OPTIMIZERS, build_layers, smooth_muon
from tests.pipeline.oracles import AHEAD
from tests.pipeline.reference import microbatches_per_update, reads, train_plainly

SIZES = pytest.mark.parametrize("size", CASES_OF, ids="{0[0]} stages, {0[1]} ranks".format)


@cache
@smooth_muon()
def expected(case: Case, num_stages: int) -> reference.Trained:
    return reference.train_in_one_process(
        partial(build_layers, case.dtype),
        case.split(num_stages),
        mse_loss,
        OPTIMIZERS[case.optimizer],
        case.schedule,
        case.streams,
        case.num_microbatches,
        prediction_of(case.schedule),
        case.correction,
        case.rates,
    )


def prediction_of(schedule: Schedule) -> reference.Prediction:
    if isinstance(schedule.prediction, Rollout):
        return partial(reference.roll_out, schedule.prediction.persistence)
    if isinstance(schedule.prediction, LastUpdate):
        return reference.repeat_last_update
    return reference.predict


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def assert_like_reference(size: Size, case: Case) -> None:
    found, wanted = of_all_ranks(size, train_case, case), expected(case, size[0])
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[case.dtype]
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    if case.is_plain and case.dtype == torch.float32:
        assert_same(found.state, wanted.state)
    else:
        torch.testing.assert_close(found.state, wanted.state, rtol=tolerance, atol=tolerance)


@smooth_muon()
def assert_plain(size: Size, case: Case) -> None:
    """Compare with a plain training loop, bitwise, if the case is of one stage or flushes."""
    if size != (1, 1) and not (size == DEEP and case.schedule in FLUSHING):
        return
    model = train_plainly(
        partial(build_layers, case.dtype),
        mse_loss,
        OPTIMIZERS[case.optimizer],
        case.streams,
        case.num_microbatches,
        update_each=microbatches_per_update(case.schedule, case.num_microbatches) == 1,
    )
    assert_same(of_all_ranks(size, train_case, case).state, model.state_dict())


def assert_batch_norm_counts_every_microbatch_once(size: Size, case: Case) -> None:
    state = of_all_ranks(size, train_case, case).state
    assert state["4.num_batches_tracked"] == 4 * case.num_microbatches


def assert_copies_match_the_simulator(size: Size, case: Case) -> None:
    shape = PipelineShape(size[0], case.num_microbatches, size[1])
    copies = run(case.schedule, shape, steps=3).weights.copies.tolist()
    if case.bare_stage:
        copies[1] = 1  # a stage without parameters
    assert of_all_ranks(size, train_case, case).copies == dict(enumerate(copies))


@SIZES
def test_every_schedule_trains_like_its_reference(size, subtests):
    for case in CASES_OF[size]:
        with subtests.test(case=str(case)):
            assert_like_reference(size, case)


@pytest.mark.parametrize("size", [(1, 1), DEEP])
def test_one_stage_or_a_flush_is_bitwise_a_plain_training_loop(size, subtests):
    for case in CASES_OF[size]:
        with subtests.test(case=str(case)):
            assert_plain(size, case)


@SIZES
def test_batch_norm_counts_every_microbatch_once(size, subtests):
    for case in CASES_OF[size]:
        with subtests.test(case=str(case)):
            assert_batch_norm_counts_every_microbatch_once(size, case)


@SIZES
def test_weight_copies_match_the_simulator(size, subtests):
    for case in CASES_OF[size]:
        with subtests.test(case=str(case)):
            assert_copies_match_the_simulator(size, case)


@pytest.mark.slow
@pytest.mark.parametrize("size", OTHER_CASES_OF)
def test_every_other_case(size, subtests):
    for case in OTHER_CASES_OF[size]:
        with subtests.test(case=str(case)):
            assert_like_reference(size, case)
            assert_plain(size, case)
            assert_batch_norm_counts_every_microbatch_once(size, case)
            assert_copies_match_the_simulator(size, case)


COPIES = [
    (GPipe(), [1, 1, 1, 1]),
    (PipeMare(), [1, 1, 1, 1]),
    (PipeDream(), [4, 3, 2, 1]),
    (PipeDream2BW(), [2, 2, 2, 2]),
    (PipeOptim("live"), [2, 2, 2, 1]),
]


def test_weight_copies_match_the_papers():
    for schedule, copies in COPIES:
        found = of_all_ranks(DEEP, train_case, Case(schedule)).copies
        assert found == dict(enumerate(copies)), schedule


def assert_stands_still(schedule: Schedule) -> None:
    found = of_all_ranks(DEEP, stand_still, schedule)
    assert found.losses == of_all_ranks(DEEP, stand_still, GPipe()).losses
    first = nn.Sequential(*build_layers(torch.float32)).state_dict()
    changed = {name for name, value in first.items() if not torch.equal(value, found.state[name])}
    assert changed == {"4.running_mean", "4.running_var", "4.num_batches_tracked"}


@pytest.mark.slow  # follows from the references
def test_with_a_learning_rate_of_0_all_schedules_are_equal(subtests):
    for schedule in STILL:
        with subtests.test(schedule=schedule):
            assert_stands_still(schedule)


@pytest.mark.slow  # follows from the references
def test_every_layer_of_a_stage_reads_the_right_version():
    num_stages, num_ranks = DEEP
    for schedule, layer in product(WATCHED, range(4 * num_stages)):
        stage = layer // 4
        rules = [reads(schedule, m, stage, num_stages, num_microbatches=4) for m in range(12)]
        passes = of_ranks(DEEP, watch, schedule)[stage % num_ranks][layer]
        for found, wanted in zip(passes, zip(*rules, strict=True), strict=True):
            multiples = [1 + read.version + AHEAD * read.horizon for read in wanted]
            assert found == pytest.approx(multiples, rel=1e-9), (schedule, layer)


def test_exact_predictions_equal_sequential_training(subtests):
    for schedule in EXACT:
        with subtests.test(schedule=schedule):
            found = of_all_ranks(DEEP, train_with_exact_predictions, schedule)
            truth = train_sequentially(schedule)
            assert found.losses == pytest.approx(truth.losses, rel=1e-15)
            assert_same(found.state, truth.state)


def test_prediction_converges_where_plain_asynchrony_diverges():
    naive, predicted = (of_all_ranks(DEEP, roll_downhill, schedule).losses for schedule in ROLLING)
    assert naive[-1] > 10 * naive[0]
    assert predicted[-1] < 0.1 * predicted[0]
