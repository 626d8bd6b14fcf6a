"""Weight versions, staleness and copies of each schedule, as in its paper.

What each microbatch reads is in ``reads`` of ``tests/pipeline/reference.py``.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from pyparallel.pipeline import (
    Delayed,
    GPipe,
    Kind,
    Nesterov,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipeMare,
    PipeOptim,
    SpecTrain,
    WeightVersion,
    XPipe,
    ZeroBubble,
)
from pyparallel.planning.pipelines import simulate
from tests.pipeline.every_schedule import run

COPIES = {  # of each of four stages, with five microbatches in a step
    GPipe(): [1, 1, 1, 1],
    ZeroBubble(): [1, 1, 1, 1],
    PipeMare(): [1, 1, 1, 1],
    Nesterov("live"): [1, 1, 1, 1],
    PipeMare(decay=0.25): [2, 2, 2, 1],
    PipeOptim("live"): [2, 2, 2, 1],
    XPipe("live"): [2, 2, 2, 1],
    SpecTrain(1): [2, 2, 2, 2],
    PipeDream2BW(): [2, 2, 2, 2],
    PipeDream(): [4, 3, 2, 1],
    Nesterov(): [4, 3, 2, 1],
    PipeOptim("consistent"): [5, 4, 3, 1],
    SpecTrain(2): [5, 4, 3, 1],
}


def test_copies_are_those_of_the_papers():
    for schedule, copies in COPIES.items():
        done = run(schedule, PipelineShape(4, 5, 4), steps=3)
        assert done.weights.copies.tolist() == copies, schedule


def test_staleness_is_the_later_stages_or_the_microbatches_in_flight():
    done = run(PipeDream(), PipelineShape(4, 5, 4), steps=3)
    stages, _, microbatches = done.table.rows.T
    computes = done.table.rows[:, 1] != Kind.UPDATE
    expected = np.minimum(microbatches, 3 - stages)[computes]
    assert done.weights.staleness[computes].tolist() == expected.tolist()
    flushed = run(GPipe(), PipelineShape(4, 5, 4), steps=3)
    assert not flushed.weights.staleness.any()


@pytest.mark.parametrize(("stages", "microbatches", "delay"), [(1, 4, 0), (8, 3, 3), (8, 7, 1)])
def test_2bw_has_the_smallest_possible_staleness(stages, microbatches, delay):
    shape = PipelineShape(stages, microbatches, stages)
    done = run(PipeDream2BW(), shape, steps=6)
    assert done.forward_staleness.tolist() == [delay] * stages
    assert done.weights.copies.tolist() == [delay + 1] * stages
    actions = PipeDream2BW().actions(stages, microbatches, steps=6)
    with pytest.raises(ValueError, match="must read a version from 0 to the newest"):
        simulate(actions, versions=Delayed(delay - 1))  # a smaller delay is impossible


def test_actions_without_updates_read_the_first_version():
    actions = [[a for a in rank if a.kind is not Kind.UPDATE] for rank in GPipe().actions(2, 3)]
    done = simulate(actions)
    assert not done.weights.version.any()
    assert not done.weights.staleness.any()


@dataclass(frozen=True)
class FromTheFuture:
    def forward(self, counters, stage):
        return WeightVersion(counters.update, counters.update * 0)

    def backward(self, counters, stage):
        return WeightVersion(counters.update, counters.update * 0)


def test_a_policy_cannot_read_a_version_that_does_not_exist():
    sentence = r"got FromTheFuture\(\) that reads version 1 on stage 0 after 0 updates"
    with pytest.raises(ValueError, match=sentence):
        simulate(PipeDream().actions(2, 4), versions=FromTheFuture())


BAD_OPTIONS = [
    (lambda: PipeOptim("newest"), 'weights must be "consistent" or "live", got \'newest\''),
    (lambda: XPipe(weights=1), 'weights must be "consistent" or "live", got 1'),
    (lambda: Nesterov(None), 'weights must be "consistent" or "live", got None'),
    (lambda: PipeMare(annealing=-1), "annealing must be an integer of at least 0, got -1"),
    (lambda: PipeMare(annealing=1.5), "annealing must be an integer of at least 0, got 1.5"),
    (lambda: PipeMare(decay=1.0), r"decay must be in \(0, 1\) or None, got 1.0"),
    (lambda: SpecTrain(variant=3), "variant must be 1 or 2, got 3"),
]


def test_bad_options_are_refused_in_one_sentence(subtests):
    for make, sentence in BAD_OPTIONS:
        with subtests.test(sentence=sentence), pytest.raises(ValueError, match=f"^{sentence}$"):
            make()
