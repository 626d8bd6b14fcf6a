"""Schedules from explicit actions."""

import pytest

from pyparallel.pipeline import Interleaved, OneForwardOneBackward, PipelineShape, parse_action
from pyparallel.planning.pipelines import FromActions, read_csv, without_updates, write_csv

SHAPE = PipelineShape(2, 3, 2)


def written(*ranks):
    return tuple(tuple(map(parse_action, rank.split())) for rank in ranks)


def test_a_file_runs_as_the_schedule_that_was_written(tmp_path):
    schedule = OneForwardOneBackward()
    actions = schedule.actions(2, 3)
    for each in (actions, without_updates(actions)):
        write_csv(each, tmp_path / "schedule.csv")
        again = FromActions(read_csv(tmp_path / "schedule.csv"))
        assert again.error_at(SHAPE) is None
        for rank in range(2):
            for index in range(3):
                assert list(again.step(SHAPE, rank, index)) == list(
                    schedule.step(SHAPE, rank, index)
                )


def test_a_deadlock_and_an_update_before_the_end_are_refused():
    with pytest.raises(ValueError, match="must not deadlock"):
        FromActions(written("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"))
    with pytest.raises(ValueError, match="rank's updates at its end, got 0U0 of rank 0 before it"):
        FromActions(written("0F0 0B0 0U0 0F1 0B1 0U1"))


def test_another_shape_is_refused():
    schedule = FromActions(written("0F0 0B0"))
    assert schedule.error_at(SHAPE) == (
        "schedule must be for the trainer's "
        "PipelineShape(num_stages=2, num_microbatches=3, num_ranks=2), got actions for "
        "PipelineShape(num_stages=1, num_microbatches=1, num_ranks=1)"
    )


def test_stages_in_v_order_are_refused():
    looped = Interleaved().actions(4, 2, 2)
    bent = written("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert FromActions(looped).error_at(PipelineShape(4, 2, 2)) is None
    assert FromActions(bent).error_at(PipelineShape(4, 1, 2)) == (
        "schedule must have stage s on rank s mod ranks, got stages on ranks [0, 1, 1, 0]"
    )


def test_repr_has_the_actions():
    assert repr(FromActions(written("0F0 0B0"))) == "FromActions(0F0 0B0)"
