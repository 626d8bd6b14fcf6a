"""Bubble, memory and deadlocks: the papers' formulas, and invalid actions."""

import numpy as np
import pytest

from pyparallel.pipeline import (
    GPipe,
    Interleaved,
    Kind,
    OneForwardOneBackward,
    PipeDream,
    PipelineShape,
    PipeOptim,
    ZeroBubble,
    parse_action,
)
from pyparallel.planning.pipelines import Costs, simulate
from tests.pipeline.every_schedule import STREAMING, run

EVEN = Costs(forward=1, backward=1)
SIZES = [(p, m) for p in (1, 2, 4, 7) for m in (1, 3, 8, 16)]


def test_bubble_of_a_flush(subtests):
    for schedule in [GPipe(), OneForwardOneBackward()]:
        for costs in [EVEN, Costs()]:
            with subtests.test(schedule=schedule, costs=costs):
                for p, m in SIZES:
                    bubble = run(schedule, PipelineShape(p, m, p), costs=costs).bubble
                    assert bubble == pytest.approx((p - 1) / (m + p - 1)), (p, m)


@pytest.mark.parametrize("v", [2, 3])
def test_bubble_of_interleaving(v):
    for p, m in [(2, 2), (2, 8), (4, 4), (4, 16), (3, 9)]:
        bubble = run(Interleaved(), PipelineShape(v * p, m, p), costs=EVEN).bubble
        assert bubble == pytest.approx((p - 1) / (v * m + p - 1)), (p, m)


def test_bubble_with_a_split_backward_is_a_third_of_that_of_a_flush():
    # (p - 1)(F + I - W) idle beside m (F + I + W) busy (Qi et al., table 2, ZB-H1).
    for p, m in [(2, 2), (4, 4), (4, 8), (7, 16)]:
        bubble = run(ZeroBubble(), PipelineShape(p, m, p)).bubble
        assert bubble == pytest.approx((p - 1) / (3 * m + p - 1)), (p, m)
        assert bubble < run(OneForwardOneBackward(), PipelineShape(p, m, p)).bubble


def test_no_bubble_without_a_flush_in_steady_state(subtests):
    for schedule in STREAMING:
        for microbatches in [1, 4, 6]:
            with subtests.test(schedule=schedule, microbatches=microbatches):
                shape, steps = PipelineShape(4, microbatches, 4), 48 // microbatches
                done = run(schedule, shape, steps)
                first = done.table.rows[: done.table.offsets[1]]
                full = done.ends[np.flatnonzero(first[:, 1] == Kind.BACKWARD)[0]]
                last_forward = done.starts[np.flatnonzero(first[:, 1] == Kind.FORWARD)[-1]]
                assert last_forward - full > 100
                assert done.bubble_between(full, last_forward) == pytest.approx(0)
                # Warm-up and cool-down cost as much as one flush, whatever the length of the run.
                assert done.bubble == pytest.approx(3 / (48 + 3))


def test_a_run_that_takes_no_time_has_no_bubble():
    assert simulate(GPipe().actions(2, 1), Costs(forward=0, backward=0)).bubble == 0


def test_peak_activations():
    for d, m in [(1, 1), (4, 2), (4, 8), (8, 16)]:
        stages, shape = np.arange(d), PipelineShape(d, m, d)
        assert run(GPipe(), shape).peak_activations.tolist() == [m] * d
        expected = np.minimum(d - stages, m).tolist()
        assert run(OneForwardOneBackward(), shape).peak_activations.tolist() == expected
        assert run(PipeOptim(), shape).peak_activations.tolist() == expected
        # Delayed weight parts hold theirs: as many on each stage as 1F1B on its first.
        assert run(ZeroBubble(), shape).peak_activations.max() == min(d, m)


def test_a_rank_holds_the_activations_of_all_its_stages():
    # Megatron's bound: (v - 1) p + 2 (p - 1 - rank) + 1 parts.
    done = run(Interleaved(), PipelineShape(8, 8, 4))
    assert done.peak_activations_of_ranks.tolist() == [11, 9, 7, 5]


def test_messages_have_latency_except_within_a_rank():
    costs = Costs(communication=0.5)
    apart = simulate(OneForwardOneBackward().actions(2, 1), costs)
    assert apart.makespan == 7
    together = simulate(OneForwardOneBackward().actions(2, 1, 1), costs)
    assert together.makespan == 6


def test_an_update_waits_for_the_last_round_with_replicas():
    costs = Costs(forward=[1, 2], backward=[1, 2], round=[0.5, 9])
    done = simulate(PipeDream().actions(2, 3), costs)
    updates = done.table.rows[:, 1] == Kind.UPDATE
    stages, begins = done.table.rows[updates, 0], done.starts[updates]
    # Stage 1 takes 4 for a microbatch, after 1; each round 9 after its update.
    assert begins[stages == 1].tolist() == [5, 14, 23]
    rounds = (done.round_ends - done.ends)[updates]
    assert rounds.tolist() == [0.5, 0.5, 0.5, 9, 9, 9]
    assert (done.round_ends == done.ends)[~updates].all()


def test_costs_of_single_stages():
    costs = Costs(forward=[1, 3], backward=[2, 5], update=[0.5, 0.25], communication=[0.125, 9])
    done = simulate(GPipe().actions(2, 1), costs)
    # 0F0, send, 1F0, 1B0, send, 0B0, 0U0
    assert done.makespan == 1 + 0.125 + 3 + 5 + 0.125 + 2 + 0.5


@pytest.mark.parametrize(
    ("costs", "sentence"),
    [
        (Costs(forward=-1), "forward must be finite and not negative, got -1"),
        (Costs(update=float("nan")), "update must be finite and not negative, got nan"),
        (Costs(backward=[1, 2, 3]), "backward must be one number or one for each of 2 stages, got"),
    ],
)
def test_bad_costs_are_refused_in_one_sentence(costs, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        simulate(GPipe().actions(2, 1), costs)


def parse(*ranks):
    return [[parse_action(text) for text in rank.split()] for rank in ranks]


def test_a_deadlock_is_drawn_with_the_waiting_actions():
    with pytest.raises(ValueError, match="must not deadlock") as caught:
        simulate(parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    sentence, *grid = str(caught.value).splitlines()
    assert sentence == (
        "actions must not deadlock, got rank 0 at 0B0, rank 1 at 1F1 that wait forever"
    )
    assert grid == ["rank 0  0F0 .   <- waits: 0B0", "rank 1  .   1F0 <- waits: 1F1"]


WRONG_ORDERS = [
    (["0B0 0F0"], "0B0"),  # no gradient before its forward
    (["0F0 0W0 0I0"], "0W0"),
    (["0F0 0U0 0B0"], "0U0"),
    (["0F0 0F1 0B0 0B1", "1F1 1B0 1F0 1B1"], "0B0"),
]


def test_a_wrong_order_on_one_rank_is_a_deadlock_too(subtests):
    for ranks, first in WRONG_ORDERS:
        with (
            subtests.test(ranks=ranks, first=first),
            pytest.raises(ValueError, match=f"got rank 0 at {first}"),
        ):
            simulate(parse(*ranks))


def test_a_long_deadlock_is_shown_by_its_end():
    actions = [list(rank) for rank in OneForwardOneBackward().actions(40, 200)]
    place = actions[7].index(parse_action("7B150"))
    actions[7][place], actions[7][-2] = actions[7][-2], actions[7][place]
    with pytest.raises(ValueError, match=", and 36 more ranks that wait forever") as caught:
        simulate(actions)
    lines = str(caught.value).splitlines()
    assert lines[-1] == "and 8 more ranks"
    assert len(lines) == 1 + 32 + 1
    assert "<- waits: 7B199" in lines[8]
    assert max(map(len, lines)) < 600


INCOMPLETE = [
    ([], "actions must hold at least one action, got none"),
    (["0F0 0B0 0F0"], "actions must not repeat, got 0F0 2 times"),
    (["0F0 0B0 0U0 0U0"], "actions must not repeat, got 0U0 2 times"),
    (
        ["0F0 0F1 0B0"],
        "one F and either one B or one I and one W for microbatch 1 on stage 0, got 0F1",
    ),
    (["0F0 0B0 0F999999999"], "microbatch 1 on stage 0, got none"),
    (["0F0 0B0", "1999999999F0"], "microbatch 0 on stage 1, got none"),
    (["0F0 0B0 0F99999999999"], r"must number stages and microbatches below 2\*\*31"),
    (["0F1 0B1"], "microbatch 0 on stage 0, got none"),
    (["0F0 0B0", "2F0 2B0"], "microbatch 0 on stage 1, got none"),
    (["0F0 0I0"], "microbatch 0 on stage 0, got 0F0, 0I0"),
    (["0F0 0B0 0I0 0W0"], "microbatch 0 on stage 0, got 0F0, 0B0, 0I0, 0W0"),
    (["0F0 1F0 1B0 0B0", "1U0"], "keep each stage on one rank, got stage 1 on ranks 0 and 1"),
]


def test_incomplete_actions_are_refused_in_one_sentence(subtests):
    for ranks, sentence in INCOMPLETE:
        with subtests.test(ranks=ranks, sentence=sentence):
            with pytest.raises(ValueError, match=sentence) as caught:
                simulate(parse(*ranks))
            assert "\n" not in str(caught.value)


def test_a_table_with_an_unknown_action_is_refused_in_one_sentence(subtests):
    for row in [(0, 7, 0), (-1, 0, 0), (0, 0, -1), (0, -1, 0)]:
        with (
            subtests.test(row=row),
            pytest.raises(ValueError, match=r"and a kind from 0 to 6, got \("),
        ):
            simulate([[row]])
