"""Simulated interlocking: no deadlock, and a slow stage delays only the stages that need it."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import nn

from pyparallel.pipeline import Action, Kind, OneForwardOneBackward, PipelineShape, PipelineTrainer
from pyparallel.pipeline.interlocking.heads import LinearHead
from pyparallel.pipeline.interlocking.schedule import Interlocking
from pyparallel.pipeline.interlocking.window import Farthest, Sum, Window
from pyparallel.planning.pipelines import Costs, draw, simulate, simulate_interlocking

HEAD = LinearHead(2)
SIZES = [(stages, window) for stages in range(1, 7) for window in range(1, stages + 1)]


def learned(timeline):
    """Return when each stage finished each microbatch's backward: (stages, microbatches)."""
    stages, kinds, microbatches = timeline.table.rows.T
    ends = np.full((timeline.table.num_stages, timeline.table.num_microbatches), np.nan)
    learn = kinds == Kind.LEARN
    ends[stages[learn], microbatches[learn]] = timeline.ends[learn]
    return ends


def starts(timeline):
    """Return when each action begins, without those that only send gradients."""
    table = timeline.table
    named = zip(map(table.action, range(len(table.rows))), timeline.starts.tolist(), strict=True)
    return {action: start for action, start in named if action.kind is not Kind.BACKWARD_INPUT}


@pytest.mark.parametrize("losses", [Farthest(), Sum()], ids=repr)
def test_it_never_deadlocks(losses):
    for (stages, size), count in product(SIZES, range(1, 7)):
        schedule, window = Interlocking(size, HEAD, losses), Window(stages, size, losses)
        for ranks in {1, stages}:
            done = simulate_interlocking(schedule, PipelineShape(stages, count, ranks), steps=2)
            actions = Counter(map(done.table.action, range(len(done.table.rows))))
            planned = schedule.actions(stages, count, ranks, steps=2)
            wanted = Counter(action for rank in planned for action in rank)
            sends = {a: n for a, n in actions.items() if a.kind is Kind.BACKWARD_INPUT}
            assert actions - Counter(sends) == wanted, (stages, size, count, ranks)
            assert sends.keys() == expected_sends(window, 2 * count), (stages, size, count, ranks)
            for first, last in pairwise(done.table.offsets):
                assert (done.starts[first + 1 : last] >= done.ends[first : last - 1]).all()


def expected_sends(window, microbatches):
    """Return the actions that send gradients apart from a stage's own backward."""
    stages = [s for s in range(window.num_stages) if gradients_sent(window, s)]
    return {Action(s, Kind.BACKWARD_INPUT, m) for s in stages for m in range(microbatches)}


def gradients_sent(window, stage):
    """Return how many a stage sends, without the one of its own backward."""
    last = window.num_stages - 1
    if stage == 0:
        return 0
    sent = sum(window.wanted(origin, stage - 1) for origin in range(stage, last + 1))
    # One backward computes it if the stage learns from one loss alone.
    single = stage == last or isinstance(window.losses, Farthest)
    return sent - (single and window.wanted(window.farthest(stage), stage - 1))


@pytest.mark.parametrize("losses", [Farthest(), Sum()], ids=repr)
def test_every_gradient_takes_its_time_on_every_stage(losses):
    most = 0.0
    for stages, size in SIZES:
        shape, window = PipelineShape(stages, 3, stages), Window(stages, size, losses)
        # While a head is slow several gradients arrive, to be sent together.
        costs = Costs(head=[50.0 if stage == 2 else 0.0 for stage in range(stages)])
        done = simulate_interlocking(Interlocking(size, HEAD, losses), shape, costs, steps=2)
        stage_of, kinds, _ = done.table.rows.T
        spent = done.ends - done.starts
        for stage in range(stages):
            sending = spent[(stage_of == stage) & (kinds == Kind.BACKWARD_INPUT)]
            most = max([most, *sending])
            assert sending.sum() == 6 * gradients_sent(window, stage), (stages, size, stage)
    assert most > 1  # some were sent together


def test_one_rank_never_waits():
    for stages, size in SIZES:
        done = simulate_interlocking(Interlocking(size, HEAD), PipelineShape(stages, 3, 1), steps=2)
        assert done.bubble == pytest.approx(0)


@pytest.mark.parametrize("losses", [Farthest(), Sum()], ids=repr)
def test_one_rank_runs_the_simulated_actions(losses):
    for stages, count in product((1, 2, 4), (1, 3)):
        for size in range(1, stages + 1):
            schedule = Interlocking(size, HEAD, losses)
            trainer = PipelineTrainer(
                [nn.Linear(3, 3) for _ in range(stages)],
                nn.functional.cross_entropy,
                lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                schedule,
                num_microbatches=count,
                split=list(range(1, stages)),
            )
            spans = []
            for _ in range(2):
                trainer.step(torch.randn(6, 3), torch.randint(2, (6,)))
                spans += [span.action for span in trainer.spans]
            simulated = simulate_interlocking(schedule, PipelineShape(stages, count, 1), steps=2)
            rows = range(len(simulated.table.rows))
            assert [*map(simulated.table.action, rows)] == spans, (stages, count, size)


def test_the_grid_of_a_window_of_two():
    done = simulate_interlocking(Interlocking(2, HEAD), PipelineShape(4, 1, 4), steps=2)
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
        # Stage 1 sends its own loss's gradient from 8.5 to 16.5; that of stage 2 arrives at 17.5.
        **{"0L0": 17.0, "0U0": 27.0, "1L0": 17.5, "1U0": 27.5, "2U0": 17.0},
    }


def test_the_whole_window_is_1f1b():
    costs = Costs(forward=1.0, backward=2.0, learn=2.0, update=0.25, communication=0.125)
    for stages, count in product(range(1, 7), range(1, 7)):
        shape = PipelineShape(stages, count, stages)
        ours = starts(simulate_interlocking(Interlocking(stages, HEAD), shape, costs, steps=3))
        actions = OneForwardOneBackward().actions(stages, count, steps=3)
        for action, start in starts(simulate(actions, costs)).items():
            kind = Kind.LEARN if action.kind is Kind.BACKWARD else action.kind
            assert ours[action._replace(kind=kind)] == pytest.approx(start), (stages, count, action)


def delays_of(schedule, shape, microbatch, seconds, steps):
    """Return how much later each stage's backwards end if the last stage is slow once."""
    learn = Action(shape.num_stages - 1, Kind.LEARN, microbatch)
    slow = simulate_interlocking(schedule, shape, steps=steps, delays={learn: seconds})
    return learned(slow) - learned(simulate_interlocking(schedule, shape, steps=steps))


def test_a_delayed_loss_delays_a_stage_no_sooner_than_the_window_allows():
    # The last N stages learn from the true loss. A stage that updates later sends its activations
    # later in the next step, and the stage N - 1 before it learns from that: so each step moves the
    # delay N - 1 stages on. In steady state there is no slack, and all of the delay arrives.
    for stages, size in SIZES:
        if size == 1:
            continue  # bounded by max_ahead alone: see below
        step, steps = 20, 27
        delays = delays_of(
            Interlocking(size, HEAD), PipelineShape(stages, 1, stages), step, 5.0, steps
        )
        for stage in range(stages):
            first = step + math.ceil(max(0, stages - size - stage) / (size - 1))
            expected = np.where(np.arange(steps) < first, 0.0, 5.0)
            np.testing.assert_allclose(
                delays[stage], expected, atol=1e-9, err_msg=f"{stages} {size}"
            )


def test_the_first_stage_is_not_delayed_in_the_step_of_the_delayed_loss():
    for (stages, size), count in product(SIZES, (1, 2, 4)):
        if size < stages:
            shape, last_of_step = PipelineShape(stages, count, stages), 3 * count - 1
            delays = delays_of(Interlocking(size, HEAD), shape, last_of_step, 1e4, steps=4)
            assert (delays[0, : 3 * count] <= 0).all(), (stages, size, count)
            assert delays[-1, last_of_step] == 1e4


@pytest.mark.parametrize("max_ahead", [1, 3])
def test_local_stages_run_ahead_up_to_max_ahead(max_ahead):
    costs = Costs(forward=(1, 1, 50), learn=(1, 1, 50))
    schedule = Interlocking(1, HEAD, max_ahead=max_ahead)
    done = starts(simulate_interlocking(schedule, PipelineShape(3, 2, 3), costs, steps=9))
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
    """The first stage runs a backward after each forward, the last one only after all forwards."""

    def step(self, shape, rank, index):
        kinds = [Kind.FORWARD, Kind.LEARN] if rank else [Kind.FORWARD, Kind.HEAD, Kind.LEARN]
        order = product((0, 1), kinds) if rank == 0 else ((m, k) for k in kinds for m in (0, 1))
        yield from (Action(rank, kind, microbatch) for microbatch, kind in order)


def test_a_deadlock_is_shown():
    with pytest.raises(
        ValueError, match="must not deadlock, got rank 0 at 0L0, rank 1 at 1F1 that"
    ):
        simulate_interlocking(Circular(2, HEAD), PipelineShape(2, 2, 2))


def test_a_window_beyond_the_last_stage_is_refused():
    with pytest.raises(ValueError, match=r"^window must be from 1 to .* 2, got 3"):
        simulate_interlocking(Interlocking(3, HEAD), PipelineShape(2, 1, 2))
