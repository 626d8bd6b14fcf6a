"""Interlocking on paper: it never stands still, and a late stage holds up those it must alone."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import nn

from pyparallel.pipeline import (
    Action,
    Costs,
    Kind,
    OneForwardOneBackward,
    PipelineShape,
    PipelineTrainer,
    draw,
    simulate,
)
from pyparallel.pipeline.interlocking.head_linear import LinearHead
from pyparallel.pipeline.interlocking.schedule import Interlocking
from pyparallel.pipeline.interlocking.simulate import simulate_interlocking
from pyparallel.pipeline.interlocking.window import Farthest, Sum, Window

HEAD = LinearHead(2)
SIZES = [(stages, window) for stages in range(1, 7) for window in range(1, stages + 1)]
NEVER = 10**9


def learned(timeline):
    """When each stage has learned from each microbatch: (stages, microbatches)."""
    stages, kinds, microbatches = timeline.table.rows.T
    ends = np.full((timeline.table.num_stages, timeline.table.num_microbatches), np.nan)
    learn = kinds == Kind.LEARN
    ends[stages[learn], microbatches[learn]] = timeline.ends[learn]
    return ends


def starts(timeline):
    """When each action but the ones that pass gradients on begins."""
    table = timeline.table
    named = zip(map(table.action, range(len(table.rows))), timeline.starts.tolist(), strict=True)
    return {action: start for action, start in named if action.kind is not Kind.BACKWARD_INPUT}


@pytest.mark.parametrize("losses", [Farthest(), Sum()], ids=repr)
def test_it_never_stands_still(losses):
    for (stages, size), fed in product(SIZES, range(1, 7)):
        schedule, window = Interlocking(size, HEAD, losses), Window(stages, size, losses)
        for ranks in {1, stages}:
            done = simulate_interlocking(schedule, PipelineShape(stages, fed, ranks), calls=2)
            actions = Counter(map(done.table.action, range(len(done.table.rows))))
            planned = schedule.actions(stages, fed, ranks, steps=2)
            wanted = Counter(action for rank in planned for action in rank)
            relays = {a: n for a, n in actions.items() if a.kind is Kind.BACKWARD_INPUT}
            assert actions - Counter(relays) == wanted, (stages, size, fed, ranks)
            assert relays.keys() == relayed(window, 2 * fed), (stages, size, fed, ranks)
            for first, last in pairwise(done.table.offsets):
                assert (done.starts[first + 1 : last] >= done.ends[first : last - 1]).all()


def relayed(window, microbatches):
    """Where gradients are passed on beside what a stage learns."""
    stages = [s for s in range(window.num_stages) if gradients_passed_on(window, s)]
    return {Action(s, Kind.BACKWARD_INPUT, m) for s in stages for m in range(microbatches)}


def gradients_passed_on(window, stage):
    """How many a stage passes on, but for the one that goes with its own learning."""
    last = window.num_stages - 1
    if stage == 0:
        return 0
    travel = sum(window.wanted(origin, stage - 1) for origin in range(stage, last + 1))
    # The only one that it learns from goes on if the stage before learns from it too.
    alone = stage == last or isinstance(window.losses, Farthest)
    return travel - (alone and window.wanted(window.farthest(stage), stage - 1))


@pytest.mark.parametrize("losses", [Farthest(), Sum()], ids=repr)
def test_every_gradient_takes_its_time_on_every_stage(losses):
    most = 0.0
    for stages, size in SIZES:
        layout, window = PipelineShape(stages, 3, stages), Window(stages, size, losses)
        # While a head is slow gradients pile up, to be passed on together.
        costs = Costs(head=[50.0 if stage == 2 else 0.0 for stage in range(stages)])
        done = simulate_interlocking(Interlocking(size, HEAD, losses), layout, costs, calls=2)
        of, kinds, _ = done.table.rows.T
        spent = done.ends - done.starts
        for stage in range(stages):
            passing_on = spent[(of == stage) & (kinds == Kind.BACKWARD_INPUT)]
            most = max([most, *passing_on])
            assert passing_on.sum() == 6 * gradients_passed_on(window, stage), (stages, size, stage)
    assert most > 1  # else none have come together


def test_one_rank_never_waits():
    for stages, size in SIZES:
        done = simulate_interlocking(Interlocking(size, HEAD), PipelineShape(stages, 3, 1), calls=2)
        assert done.bubble == pytest.approx(0)


@pytest.mark.parametrize("losses", [Farthest(), Sum()], ids=repr)
def test_one_rank_does_in_truth_what_it_does_on_paper(losses):
    for stages, fed in product((1, 2, 4), (1, 3)):
        for size in range(1, stages + 1):
            schedule = Interlocking(size, HEAD, losses)
            trainer = PipelineTrainer(
                [nn.Linear(3, 3) for _ in range(stages)],
                nn.functional.cross_entropy,
                lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                schedule,
                num_microbatches=fed,
                split=list(range(1, stages)),
            )
            spans = []
            for _ in range(2):
                trainer.step(torch.randn(6, 3), torch.randint(2, (6,)))
                spans += [span.action for span in trainer.spans]
            on_paper = simulate_interlocking(schedule, PipelineShape(stages, fed, 1), calls=2)
            assert on_paper.table.actions() == (tuple(spans),), (stages, fed, size)


def test_the_grid_of_a_window_of_two():
    done = simulate_interlocking(Interlocking(2, HEAD), PipelineShape(4, 1, 4), calls=2)
    assert draw(done.table, done.starts, done.ends).splitlines() == [
        "rank 0  0F0 .   .   0L0 --- 0F1 .   .   0L1 --- .   .   .   .",
        "rank 1  .   1F0 1I0 .   1L0 --- 1F1 1I1 .   .   1L1 --- .   .",
        "rank 2  .   .   2F0 2I0 .   .   2L0 --- 2F1 2I1 .   .   2L1 ---",
        "rank 3  .   .   .   3F0 3L0 --- .   .   .   3F1 3L1 --- .   .",
    ]


def test_costs_and_latencies():
    costs = Costs(
        forward=(1, 2, 3), head=(4, 5, 6), backward_input=(7, 8, 9), learn=10, communication=0.5
    )
    done = starts(simulate_interlocking(Interlocking(2, HEAD), PipelineShape(3, 1, 3), costs))
    assert {str(action): start for action, start in done.items()} == {
        **{"0F0": 0.0, "0H0": 1.0, "1F0": 1.5, "1H0": 3.5, "2F0": 4.0, "2L0": 7.0},
        # 1's own loss is passed on from 8.5 to 16.5, 2's is there at 17.5.
        **{"0L0": 17.0, "0U0": 27.0, "1L0": 17.5, "1U0": 27.5, "2U0": 17.0},
    }


def test_the_whole_window_is_1f1b():
    costs = Costs(forward=1.0, backward=2.0, learn=2.0, update=0.25, communication=0.125)
    for stages, fed in product(range(1, 7), range(1, 7)):
        layout = PipelineShape(stages, fed, stages)
        mine = starts(simulate_interlocking(Interlocking(stages, HEAD), layout, costs, calls=3))
        actions = OneForwardOneBackward().actions(stages, fed, steps=3)
        for action, start in starts(simulate(actions, costs)).items():
            kind = Kind.LEARN if action.kind is Kind.BACKWARD else action.kind
            assert mine[action._replace(kind=kind)] == pytest.approx(start), (stages, fed, action)


def lateness(schedule, layout, microbatch, seconds, calls):
    """How much later each stage learns from each microbatch if the last one is late once."""
    learn = Action(layout.num_stages - 1, Kind.LEARN, microbatch)
    late = simulate_interlocking(schedule, layout, calls=calls, delays={learn: seconds})
    return learned(late) - learned(simulate_interlocking(schedule, layout, calls=calls))


def test_a_late_loss_reaches_a_stage_no_sooner_than_the_window_lets_it():
    # The true loss is what the last N stages learn from, and who updates late hands on late in the
    # next call: the stage N - 1 before it learns from that. So a call moves it N - 1 stages on.
    # Once the pipe has settled there is no slack, and all of it arrives.
    for stages, size in SIZES:
        if size == 1:
            continue  # only by how far a stage may be ahead: see below
        call, calls = 20, 27
        late = lateness(
            Interlocking(size, HEAD), PipelineShape(stages, 1, stages), call, 5.0, calls
        )
        for stage in range(stages):
            first = call + math.ceil(max(0, stages - size - stage) / (size - 1))
            expected = np.where(np.arange(calls) < first, 0.0, 5.0)
            np.testing.assert_allclose(late[stage], expected, atol=1e-9, err_msg=f"{stages} {size}")


def test_the_first_stage_learns_in_time_from_the_call_whose_loss_is_late():
    for (stages, size), fed in product(SIZES, (1, 2, 4)):
        if size < stages:
            layout, last_of_call = PipelineShape(stages, fed, stages), 3 * fed - 1
            late = lateness(Interlocking(size, HEAD), layout, last_of_call, 1e4, calls=4)
            assert (late[0, : 3 * fed] <= 0).all(), (stages, size, fed)
            assert late[-1, last_of_call] == 1e4


def first_late(stages, size, fed, microbatch, ahead_of_next):
    """The first microbatch of each stage that is late, if its loss is late once.

    A forward is late if the one before it is, or if the learning is that the order has before it.
    The learning is late if a forward is that its loss depends on, or the late loss is its own.
    """
    farthest = [min(s + size - 1, stages - 1) for s in range(stages)]
    forward, learn = [NEVER] * stages, [NEVER] * (stages - 1) + [microbatch]
    while True:
        before = list(forward), list(learn)
        for s in range(stages):
            learn[s] = min(learn[s], forward[farthest[s]])
            if farthest[s] == stages - 1:
                learn[s] = min(learn[s], learn[-1])
            next_in_order = learn[s] + farthest[s] - s + 1
            next_call = (learn[s] // fed + 1) * fed
            forward[s] = min(forward[s], next_in_order, next_call, *forward[max(0, s - 1) : s])
            if size == 1 and s < stages - 1:
                forward[s] = min(forward[s], forward[s + 1] + ahead_of_next)
        if before == (forward, learn):
            return learn


@pytest.mark.parametrize("max_ahead", [1, 2])
def test_which_microbatches_are_late_follows_from_the_order(max_ahead):
    for (stages, size), fed in product(SIZES, (1, 4)):
        if max_ahead > 1 and size > 1:
            continue
        schedule, layout = (
            Interlocking(size, HEAD, max_ahead=max_ahead),
            PipelineShape(stages, fed, stages),
        )
        for microbatch in (fed, 2 * fed - 1):
            late = lateness(schedule, layout, microbatch, 1e4, calls=8) > 5e3
            found = np.where(late.any(axis=1), late.argmax(axis=1), NEVER)
            expected = np.array(first_late(stages, size, fed, microbatch, max_ahead * fed))
            expected[expected >= 8 * fed] = NEVER
            assert found.tolist() == expected.tolist(), (stages, size, fed, microbatch)


@pytest.mark.parametrize("max_ahead", [1, 3])
def test_local_stages_go_ahead_as_far_as_they_may(max_ahead):
    costs = Costs(forward=(1, 1, 50), learn=(1, 1, 50))
    schedule = Interlocking(1, HEAD, max_ahead=max_ahead)
    done = starts(simulate_interlocking(schedule, PipelineShape(3, 2, 3), costs, calls=9))
    ahead = [
        sum(
            done[Action(1, Kind.FORWARD, later)] < done[Action(2, Kind.FORWARD, m)] + 50
            for later in range(m, 18)
        )
        for m in range(18)
    ]  # forwards of stage 1 that began before the last stage had done the same microbatch
    assert max(ahead) == 2 * max_ahead


@dataclass(frozen=True)
class Circular(Interlocking):
    """The first stage learns before it feeds in again, the last one only after all forwards."""

    def step(self, layout, rank, index):
        kinds = [Kind.FORWARD, Kind.LEARN] if rank else [Kind.FORWARD, Kind.HEAD, Kind.LEARN]
        order = product((0, 1), kinds) if rank == 0 else ((m, k) for k in kinds for m in (0, 1))
        yield from (Action(rank, kind, microbatch) for microbatch, kind in order)


def test_a_circle_is_shown():
    with pytest.raises(
        ValueError, match="must not deadlock, got rank 0 at 0L0, rank 1 at 1F1 that"
    ):
        simulate_interlocking(Circular(2, HEAD), PipelineShape(2, 2, 2))


def test_a_layout_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"^window must be from 1 to .* 2, got 3"):
        simulate_interlocking(Interlocking(3, HEAD), PipelineShape(2, 1, 2))
