"""The contract of every schedule: it runs, is complete, and splits into steps."""

import itertools

import pytest

from pyparallel import pipeline
from pyparallel.pipeline import Interleaved, Kind, PipelineShape
from tests.pipeline.every_schedule import EVERY_SCHEDULE, FLUSHING, STREAMING, run

SMALL = [
    PipelineShape(stages, microbatches, ranks)
    for stages in range(1, 9)
    for ranks in range(1, stages + 1)
    if stages % ranks == 0
    for microbatches in (1, 2, 3, 5, 8, 11)
]


@pytest.mark.slow
# One of each order: asynchronous schedules share theirs, apart from the updates.
def test_no_deadlock_for_any_small_shape(subtests):
    for schedule in [*FLUSHING, *STREAMING[:2]]:
        with subtests.test(schedule=schedule):
            for shape in SMALL:
                done = run(schedule, shape)  # raises on a deadlock or a missing action
                backwards = done.table.rows[:, 1] == Kind.BACKWARD
                weights = done.table.rows[:, 1] == Kind.BACKWARD_WEIGHT
                expected = shape.num_stages * shape.num_microbatches
                assert backwards.sum() + weights.sum() == expected, shape
                assert not (done.ends != done.ends).any(), shape


def without_versions(actions):
    return [[action for action in rank if action.kind is not Kind.UPDATE] for rank in actions]


def test_asynchronous_schedules_share_one_order(subtests):
    for schedule in STREAMING:
        with subtests.test(schedule=schedule):
            first = STREAMING[0].actions(4, 3, steps=3)
            assert without_versions(schedule.actions(4, 3, steps=3)) == without_versions(first)


def test_consecutive_steps_run(subtests):
    for schedule in EVERY_SCHEDULE:
        for shape in [PipelineShape(4, 6, 4), PipelineShape(4, 2, 2), PipelineShape(6, 7, 3)]:
            with subtests.test(schedule=schedule, shape=shape):
                done = run(schedule, shape, steps=4)
                assert done.table.num_microbatches == 4 * shape.num_microbatches
                for stage, rows in enumerate(done.table.stage_rows()):
                    updates = done.table.rows[rows, 1] == Kind.UPDATE
                    last = 4 * shape.num_microbatches - 1
                    assert updates.sum() == schedule.update_index(shape, last) + 1, stage


def test_a_step_runs_its_own_microbatches_on_every_stage(subtests):
    for schedule in EVERY_SCHEDULE:
        with subtests.test(schedule=schedule):
            shape = PipelineShape(4, 5, 4)
            for rank, index in itertools.product(range(4), range(3)):
                actions = list(schedule.step(shape, rank, index))
                forwards = [each.microbatch for each in actions if each.kind is Kind.FORWARD]
                assert forwards == list(range(5 * index, 5 * index + 5))


def test_stage_s_of_d_has_d_minus_1_minus_s_pending_backwards_after_a_step(subtests):
    for schedule in STREAMING:
        with subtests.test(schedule=schedule):
            shape = PipelineShape(4, 5, 4)
            pending = [
                sum(action.kind is Kind.BACKWARD for action in schedule.drain(shape, rank, steps=3))
                for rank in range(4)
            ]
            assert pending == [3, 2, 1, 0]


def test_flushing_schedules_have_nothing_pending(subtests):
    for schedule in FLUSHING:
        with subtests.test(schedule=schedule):
            assert list(schedule.drain(PipelineShape(4, 5, 4), 0, steps=3)) == []


def test_update_index_matches_the_actions(subtests):
    for schedule in EVERY_SCHEDULE:
        with subtests.test(schedule=schedule):
            shape = PipelineShape(4, 6, 4)
            for rank in range(4):
                updates = 0
                for action in schedule.rank_actions(shape, rank, steps=3):
                    updates += action.kind is Kind.UPDATE
                    if action.kind in {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}:
                        assert schedule.update_index(shape, action.microbatch) == updates


def test_schedules_are_values(subtests):
    for schedule in EVERY_SCHEDULE:
        with subtests.test(schedule=schedule):
            again = eval(repr(schedule), vars(pipeline).copy())
            assert schedule == again
            assert hash(schedule) == hash(again)


BAD_SIZES = [
    ((0, 4), "num_stages must be a positive integer, got 0"),
    ((4, 0), "num_microbatches must be a positive integer, got 0"),
    ((4, 2.0), "num_microbatches must be a positive integer, got 2.0"),
    ((4, 4, 3), "num_stages must be a multiple of num_ranks, got 4 stages for 3 ranks"),
]


def test_bad_sizes_are_refused(subtests):
    for sizes, message in BAD_SIZES:
        with (
            subtests.test(sizes=sizes, message=message),
            pytest.raises(ValueError, match=f"^{message}$"),
        ):
            Interleaved().actions(*sizes)
