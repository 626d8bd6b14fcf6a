"""The bubble, the steps and the parts of a timeline."""

import numpy as np
import pytest

from pyparallel.pipeline import GPipe, Kind, PipeDream
from pyparallel.planning.pipelines import Timeline, simulate


def test_a_part_has_the_bubble_of_that_time():
    whole = simulate(GPipe().actions(3, 4, steps=2))
    part = whole.between(2.5, 17.25)
    assert part.bubble_between(0, 14.75) == pytest.approx(whole.bubble_between(2.5, 17.25))
    assert part.table.num_ranks == 3
    assert (part.starts >= 0).all()
    assert part.ends.max() <= 14.75


def test_a_part_holds_the_actions_that_overlap_it():
    whole = simulate(GPipe().actions(1, 2))  # 0F0 0F1 0B0 0B1, of 1, 1, 2 and 2
    part = whole.between(1, 4)
    assert [str(action) for action in part.table.actions()[0]] == ["0F1", "0B0"]
    assert part.starts.tolist() == [0, 1]
    assert part.ends.tolist() == [1, 3]
    assert part.makespan == 3


def test_idle_ranks_stay_in_a_part():
    whole = simulate(GPipe().actions(3, 1))
    part = whole.between(0, 1)
    assert [len(rank) for rank in part.table.actions()] == [1, 0, 0]
    assert part.bubble_between(0, 1) == pytest.approx(2 / 3)


@pytest.mark.parametrize("schedule", [GPipe(), PipeDream()], ids=repr)
def test_steps_begin_with_the_first_forward_of_the_first_stage(schedule):
    done = simulate(schedule.actions(4, 2, num_ranks=2, steps=3))
    stages, kinds, microbatches = done.table.rows.T
    forwards = (stages == 0) & (kinds == Kind.FORWARD)
    expected = [done.starts[forwards & (microbatches == 2 * step)].item() for step in range(3)]
    assert done.step_starts(2).tolist() == expected


def test_an_empty_timeline():
    empty = simulate(GPipe().actions(1, 1)).between(5, 6)
    assert isinstance(empty, Timeline)
    assert empty.makespan == 0
    assert empty.bubble == 0
    assert np.array_equal(empty.step_starts(1), [])
