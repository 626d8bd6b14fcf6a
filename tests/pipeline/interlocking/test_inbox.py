"""What a stage does with gradients, by their order of arrival."""

import pytest

from pyparallel.pipeline.interlocking.inbox import GradientInbox, GradientTask
from pyparallel.pipeline.interlocking.window import Farthest, Mean, Sum, Window


def inbox_of(stage, size, losses, num_stages=4, max_ahead=1):
    return GradientInbox(stage, Window(num_stages, size, losses), max_ahead)


def test_the_backward_waits_for_the_last_gradient_of_the_window():
    inbox = inbox_of(1, 3, Mean())
    inbox.begin(5)
    assert inbox.take_own(5) == GradientTask(5, {1: 1 / 3}, (1,), False, None)
    inbox.put(5, 3)
    assert inbox.take() == [GradientTask(5, {3: 1 / 3}, (), False, None)]  # stage 0 ends at 2
    assert inbox.is_incomplete(5)
    inbox.put(5, 2)
    assert inbox.take() == [GradientTask(5, {2: 1 / 3}, (2,), True, None)]
    assert not inbox.is_incomplete(5)
    assert not inbox.has_arrived


def test_one_backward_computes_both_gradients_of_the_only_loss():
    inbox = inbox_of(2, 2, Farthest())
    inbox.begin(0)
    assert inbox.take_own(0) == GradientTask(0, {}, (2,), False, None)
    inbox.put(0, 3)
    assert inbox.take() == [GradientTask(0, {3: 1.0}, (), True, None)]  # stage 1 ends at 2
    whole = inbox_of(2, 4, Farthest())
    whole.begin(0)
    assert whole.take_own(0) == GradientTask(0, {}, (), False, None)
    whole.put(0, 3)
    assert whole.take() == [GradientTask(0, {3: 1.0}, (), True, 3)]


def test_what_arrived_together_is_one_task_for_each_microbatch():
    inbox = inbox_of(1, 4, Sum())
    for microbatch in (0, 1):
        inbox.begin(microbatch)
        inbox.take_own(microbatch)
    for arrived in [(1, 3), (0, 2), (1, 2)]:
        inbox.put(*arrived)
    assert inbox.take() == [
        GradientTask(1, {3: 1.0, 2: 1.0}, (3, 2), True, None),
        GradientTask(0, {2: 1.0}, (2,), False, None),
    ]
    assert inbox.take() == []


@pytest.mark.parametrize("max_ahead", [1, 3])
def test_without_gradients_a_stage_waits_for_acknowledgements(max_ahead):
    inbox = inbox_of(2, 1, Farthest(), max_ahead=max_ahead)
    for microbatch in range(max_ahead):
        assert not inbox.must_wait
        inbox.begin(microbatch)
    assert inbox.must_wait
    inbox.acknowledge()
    assert not inbox.must_wait
    assert inbox.is_ahead == (max_ahead > 1)


@pytest.mark.parametrize(("stage", "size"), [(3, 1), (2, 2)])
def test_the_last_stage_and_one_that_gets_gradients_wait_for_no_acknowledgement(stage, size):
    inbox = inbox_of(stage, size, Farthest())
    for microbatch in range(5):
        inbox.begin(microbatch)
    assert not inbox.must_wait
    assert not inbox.is_ahead
