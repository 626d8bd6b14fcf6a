"""Weight versions, staleness, horizons and copies of each schedule, as in its paper."""

from dataclasses import dataclass

import numpy as np
import pytest

from pyparallel.pipeline import (
    Delayed,
    GPipe,
    Interleaved,
    Kind,
    Nesterov,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipelineShape,
    PipeMare,
    PipeOptim,
    SpecTrain,
    WeightVersion,
    XPipe,
    ZeroBubble,
    simulate,
)
from tests.pipeline.every_schedule import run


def by_microbatch(done, stage, kind, what):
    """Return ``what`` of each microbatch of a stage, in the order of microbatches."""
    rows = (done.table.rows[:, 0] == stage) & (done.table.rows[:, 1] == kind)
    order = np.argsort(done.table.rows[rows, 2])
    return getattr(done.weights, what)[rows][order].tolist()


def read(done, stage, kind):
    """Return (version, horizon) of each microbatch."""
    columns = (by_microbatch(done, stage, kind, what) for what in ("version", "horizon"))
    return list(zip(*columns, strict=True))


F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def test_flushing_reads_one_version_per_step(subtests):
    for schedule in [GPipe(), OneForwardOneBackward(), Interleaved(), ZeroBubble()]:
        with subtests.test(schedule=schedule):
            done = run(schedule, PipelineShape(4, 5, 2), steps=3)
            kinds = {F, B, I, W} & set(done.table.rows[:, 1].tolist())
            for stage in range(4):
                for kind in kinds:
                    assert read(done, stage, kind) == [
                        (step, 0) for step in range(3) for _ in range(5)
                    ]
            assert done.weights.staleness.tolist() == [0] * len(done.table.rows)
            assert done.weights.copies.tolist() == [1] * 4


def test_staleness_of_pipedream_is_the_later_stages_or_the_microbatches_in_flight():
    done = run(PipeDream(), PipelineShape(4, 5, 4), steps=3)
    for stage in range(4):
        stale = [min(m, 3 - stage) for m in range(15)]
        assert read(done, stage, F) == [(m - stale[m], 0) for m in range(15)]
        assert read(done, stage, B) == read(done, stage, F)
        assert by_microbatch(done, stage, F, "staleness") == stale
        assert by_microbatch(done, stage, B, "staleness") == stale
    assert done.weights.copies.tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("microbatches", [3, 4, 7])
def test_2bw_is_stale_by_one_update_on_every_stage_with_two_versions(microbatches):
    done = run(PipeDream2BW(), PipelineShape(4, microbatches, 4), steps=4)
    for stage in range(4):
        versions = [max(0, step - 1) for step in range(4) for _ in range(microbatches)]
        assert read(done, stage, F) == [(version, 0) for version in versions]
        assert read(done, stage, B) == read(done, stage, F)
    assert done.weights.copies.tolist() == [2] * 4


@pytest.mark.parametrize(("stages", "microbatches", "delay"), [(1, 4, 0), (8, 3, 3), (8, 7, 1)])
def test_2bw_has_the_smallest_possible_staleness(stages, microbatches, delay):
    shape = PipelineShape(stages, microbatches, stages)
    done = run(PipeDream2BW(), shape, steps=6)
    assert done.forward_staleness.tolist() == [delay] * stages
    assert done.weights.copies.tolist() == [delay + 1] * stages
    actions = PipeDream2BW().actions(stages, microbatches, steps=6)
    with pytest.raises(ValueError, match="must read a version from 0 to the newest"):
        simulate(actions, versions=Delayed(delay - 1))  # a smaller delay is impossible


def test_the_horizon_is_the_true_version_difference(subtests):
    for schedule in [PipeOptim(), SpecTrain(2), XPipe()]:
        for shape in [PipelineShape(4, 5, 4), PipelineShape(4, 2, 2), PipelineShape(8, 3, 8)]:
            with subtests.test(schedule=schedule, shape=shape):
                done = run(schedule, shape, steps=6)
                assert np.array_equal(done.weights.version + done.weights.horizon,
                                      done.weights.version + done.weights.staleness)  # fmt: skip
                assert done.weights.horizon.max() > 0


def test_horizon_of_pipeoptim_is_the_later_stages_or_the_microbatches_in_flight():
    done = run(PipeOptim("live"), PipelineShape(4, 5, 4), steps=3)
    for stage in range(4):
        ahead = [min(m, 3 - stage) for m in range(15)]
        assert read(done, stage, F) == [(m - ahead[m], ahead[m]) for m in range(15)]
        assert read(done, stage, B) == [(m, 0) for m in range(15)]
    assert done.weights.copies.tolist() == [2, 2, 2, 1]


def test_a_flush_restarts_the_warm_up():
    # The drain leaves no microbatch in flight: the next run warms up as the first one.
    first, again = (run(PipeOptim(), PipelineShape(4, 5, 4)) for _ in range(2))
    assert read(first, 0, F) == read(again, 0, F) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)]


def test_consistent_weights_are_stashed_for_the_backward():
    done = run(PipeOptim("consistent"), PipelineShape(4, 5, 4), steps=3)
    for stage in range(4):
        assert read(done, stage, B) == read(done, stage, F)
    assert done.weights.copies.tolist() == [5, 4, 3, 1]
    assert run(SpecTrain(2), PipelineShape(4, 5, 4), steps=3).weights.copies.tolist() == [
        5,
        4,
        3,
        1,
    ]


def test_spectrain_predicts_half_the_stage_index_further_in_both_passes():
    done = run(SpecTrain(1), PipelineShape(6, 5, 6), steps=4)
    for stage in range(6):
        stale = [min(m, 5 - stage) for m in range(20)]
        expected = [(m - stale[m], stale[m] + stage // 2) for m in range(20)]
        assert read(done, stage, F) == expected
        assert read(done, stage, B) == [(m, stage // 2) for m in range(20)]
    assert done.weights.copies.tolist() == [2] * 6


def test_xpipe_predicts_once_per_step():
    done = run(XPipe("live"), PipelineShape(4, 6, 4), steps=4)
    for stage in range(4):
        # The previous step is still in flight at the first forward of a step.
        stale = min(1, 3 - stage)
        steps = [(max(0, step - stale), min(step, stale)) for step in range(4)]
        assert read(done, stage, F) == [each for each in steps for _ in range(6)]
        assert read(done, stage, B) == [(step, 0) for step in range(4) for _ in range(6)]
    assert done.weights.copies.tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize("schedule", [PipeMare(), Nesterov("live")], ids=repr)
def test_live_weights_take_one_copy_and_mix_versions(schedule):
    done = run(schedule, PipelineShape(4, 5, 4), steps=3)
    for stage in range(4):
        assert read(done, stage, F) == [(max(0, m - 3 + stage), 0) for m in range(15)]
        assert read(done, stage, B) == [(m, 0) for m in range(15)]
    assert done.weights.copies.tolist() == [1] * 4


def test_pipemare_can_recompute_the_weights_of_the_forwards():
    done = run(PipeMare(decay=0.25), PipelineShape(4, 5, 4), steps=3)
    for stage in range(4):
        assert read(done, stage, F) == [(max(0, m - 3 + stage), 0) for m in range(15)]
        assert read(done, stage, B) == [(m, -min(m, 3 - stage)) for m in range(15)]
    assert done.weights.copies.tolist() == [2, 2, 2, 1]


def test_nesterov_stashes_as_pipedream():
    kept, stashed = (
        run(each, PipelineShape(4, 5, 4), steps=3) for each in (Nesterov(), PipeDream())
    )
    assert np.array_equal(kept.weights.version, stashed.weights.version)
    assert kept.weights.copies.tolist() == stashed.weights.copies.tolist()


STREAMING = [
    PipeDream(),
    PipeDream2BW(),
    SpecTrain(1),
    SpecTrain(2),
    XPipe(),
    PipeOptim(),
    PipeMare(),
]


def test_one_stage_has_no_staleness_and_no_prediction(subtests):
    for schedule in STREAMING:
        with subtests.test(schedule=schedule):
            done = run(schedule, PipelineShape(1, 3, 1), steps=4)
            assert done.weights.staleness.tolist() == [0] * len(done.table.rows)
            assert done.weights.horizon.tolist() == [0] * len(done.table.rows)
            assert done.weights.copies.tolist() == [1]


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
