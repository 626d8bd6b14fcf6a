import itertools

import pytest

from pyparallel.pipeline import Farthest, Mean, Sum, Window

SIZES = [(stages, size) for stages in range(1, 9) for size in range(1, stages + 1)]
RULES = [Farthest(), Sum(), Mean()]


def paper_sends(num_stages, size, stage):
    """Return the losses of the gradients sent to a stage: min(N - 1, K - k + 1), k = stage + 2."""
    count = min(size - 1, num_stages - stage - 1)
    return tuple(range(stage + 1, stage + 1 + count))


@pytest.mark.parametrize("losses", [Sum(), Mean()])
def test_as_many_gradients_arrive_as_in_the_paper(losses):
    for (num_stages, size), stage in itertools.product(SIZES, range(8)):
        if stage < num_stages:
            window = Window(num_stages, size, losses)
            assert window.arriving(stage) == paper_sends(num_stages, size, stage)


def test_under_farthest_gradients_that_no_stage_learns_from_are_not_sent():
    for num_stages, size in SIZES:
        window = Window(num_stages, size, Farthest())
        for stage in range(num_stages):
            useful = [o for o in paper_sends(num_stages, size, stage) if o >= size - 1]
            assert window.arriving(stage) == tuple(useful)


def test_the_farthest_loss_is_size_minus_1_stages_away_or_the_last():
    window = Window(4, 2, Farthest())
    assert [window.farthest(stage) for stage in range(4)] == [1, 2, 3, 3]
    assert [sorted(window.origins(stage)) for stage in range(4)] == [[1], [2], [3], [3]]


def test_local_and_whole_windows_are_local_and_end_to_end_learning():
    local, whole = Window(5, 1, Farthest()), Window(5, 5, Farthest())
    assert [sorted(local.origins(stage)) for stage in range(5)] == [[0], [1], [2], [3], [4]]
    assert [sorted(whole.origins(stage)) for stage in range(5)] == [[4]] * 5
    assert [local.arriving(stage) for stage in range(5)] == [()] * 5
    assert [whole.arriving(stage) for stage in range(5)] == [(4,)] * 4 + [()]


WEIGHTS = [
    (Farthest(), [0, 0, 0, 1, 0]),
    (Sum(), [0, 1, 1, 1, 0]),
    (Mean(), [0, 1 / 3, 1 / 3, 1 / 3, 0]),
]


def test_weights_of_the_losses(subtests):
    for losses, weights in WEIGHTS:
        with subtests.test(losses=losses, weights=weights):
            window = Window(5, 3, losses)
            assert [window.weight(origin, 1) for origin in range(5)] == weights


def test_the_mean_is_over_the_losses_that_exist():
    window = Window(5, 3, Mean())
    assert [window.weight(4, stage) for stage in range(5)] == [0, 0, 1 / 3, 1 / 2, 1]


def test_gradients_that_a_stage_learns_from_arrive_there(subtests):
    for losses in RULES:
        with subtests.test(losses=losses):
            for num_stages, size in SIZES:
                window = Window(num_stages, size, losses)
                for stage in range(num_stages):
                    assert window.origins(stage) <= {stage, *window.arriving(stage)}
                    assert max(window.origins(stage)) == window.farthest(stage)


def test_gradients_that_arrive_were_computed_or_received_by_the_sender(subtests):
    for losses in RULES:
        with subtests.test(losses=losses):
            for num_stages, size in SIZES:
                window = Window(num_stages, size, losses)
                for stage in range(num_stages - 1):
                    available = {stage + 1, *window.arriving(stage + 1)}
                    assert set(window.arriving(stage)) <= available


class Nearest:
    """The loss of the stage itself; for stage 3 that of the next."""

    def weight(self, origin, stage, farthest):
        return float(origin == min(stage + (stage == 3), farthest))


def test_a_custom_rule_decides_which_gradients_are_sent():
    window = Window(5, 3, Nearest())
    assert [window.arriving(stage) for stage in range(5)] == [(), (), (), (4,), ()]
