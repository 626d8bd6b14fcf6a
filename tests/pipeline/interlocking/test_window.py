import itertools

import pytest

from pyparallel.pipeline import Farthest, Mean, Sum, Window
from tests.pipeline.interlocking.jobs import RULES

SIZES = [(stages, size) for stages in range(1, 9) for size in range(1, stages + 1)]


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


def test_a_stage_learns_as_the_rules_say_from_gradients_that_arrive(subtests):
    for losses, rule in RULES.items():
        with subtests.test(losses=losses):
            for num_stages, size in SIZES:
                window = Window(num_stages, size, losses)
                for stage in range(num_stages):
                    wanted = rule(stage, num_stages, size)
                    origins, arriving = window.origins(stage), {*window.arriving(stage)}
                    assert origins == wanted.keys()
                    weights = [window.weight(origin, stage) for origin in range(num_stages)]
                    assert weights == [wanted.get(origin, 0) for origin in range(num_stages)]
                    assert origins <= {stage, *arriving}
                    assert max(origins) == window.farthest(stage)
                    if stage < num_stages - 1:  # the sender has computed or received them
                        assert arriving <= {stage + 1, *window.arriving(stage + 1)}


class Nearest:
    """The loss of the stage itself; for stage 3 that of the next."""

    def weight(self, origin, stage, farthest):
        return float(origin == min(stage + (stage == 3), farthest))


def test_a_custom_rule_decides_which_gradients_are_sent():
    window = Window(5, 3, Nearest())
    assert [window.arriving(stage) for stage in range(5)] == [(), (), (), (4,), ()]
