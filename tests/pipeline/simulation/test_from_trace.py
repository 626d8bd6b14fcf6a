"""From the traces of ranks to the costs of a simulation that reproduces them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pyparallel.pipeline import (
    Costs,
    GPipe,
    Interleaved,
    Interlocking,
    Kind,
    LinearHead,
    PipeDream,
    PipelineShape,
    Span,
    ZeroBubble,
    costs_from_timeline,
    simulate,
    simulate_interlocking,
    timeline_from_trace,
)

COSTS = Costs(
    forward=[1.0, 2.0, 1.5, 1.25],
    backward=[2.0, 3.0, 3.5, 2.25],
    backward_input=[1.0, 1.5, 2.0, 0.5],
    backward_weight=[0.5, 1.0, 1.5, 0.75],
    update=[0.25, 0.5, 0.75, 0.125],
    head=[1.0, 1.75, 0.5, 0.0],
    learn=[2.0, 3.0, 3.5, 2.25],
    communication=[0.5, 0.25, 0.125, 0.0],
)


def spans_of(simulation, begin=0.0):
    """Return the spans that an executor would have recorded."""
    table, offsets = simulation.table, simulation.table.offsets.tolist()
    spans = [
        Span(table.action(row), begin + start, begin + end)
        for row, (start, end) in enumerate(zip(simulation.starts, simulation.ends, strict=True))
    ]
    return [spans[i:j] for i, j in pairwise(offsets)]


SIZES = [(GPipe(), 4), (PipeDream(), 4), (ZeroBubble(), 4), (Interleaved(), 2)]


def test_a_simulation_with_measured_costs_reproduces_the_run(subtests):
    for schedule, num_ranks in SIZES:
        with subtests.test(schedule=schedule, num_ranks=num_ranks):
            actions = schedule.actions(4, 4, num_ranks=num_ranks, steps=2)
            ran = simulate(actions, COSTS)
            measured = timeline_from_trace(spans_of(ran, begin=1e3))
            assert measured.bubble == pytest.approx(ran.bubble)
            again = simulate(actions, costs_from_timeline(measured))
            assert again.starts == pytest.approx(ran.starts)
            assert again.ends == pytest.approx(ran.ends)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_gradients_of_a_stages_own_head_are_not_messages(window):
    """They are sent before those of the next stage, whose message would look too early."""
    schedule, shape = Interlocking(window, LinearHead(2)), PipelineShape(4, 4, 4)
    costs = replace(COSTS, forward=[9.0, 2.0, 1.5, 1.25])
    ran = simulate_interlocking(schedule, shape, costs, steps=2)
    measured = costs_from_timeline(timeline_from_trace(spans_of(ran)))
    again = simulate_interlocking(schedule, shape, measured, steps=2)
    assert again.starts == pytest.approx(ran.starts)
    assert again.ends == pytest.approx(ran.ends)


def test_times_count_from_the_first_begin_and_rows_keep_their_order():
    ran = simulate(GPipe().actions(2, 2), COSTS_OF_TWO)
    measured = timeline_from_trace(spans_of(ran, begin=-7.0))
    assert measured.table.actions() == ran.table.actions()
    assert measured.starts == pytest.approx(ran.starts)


COSTS_OF_TWO = Costs(forward=1, backward=2, communication=0.5)


def test_costs_are_medians_and_messages_are_timed_if_the_receiver_was_idle():
    ran = simulate(GPipe().actions(2, 3), COSTS_OF_TWO)
    spans = spans_of(ran)
    slow = spans[0][5]  # the last backward, with nothing but the update after it
    assert slow.action.kind is Kind.BACKWARD
    spans[0][5] = Span(slow.action, slow.begin, slow.begin + 10)
    costs = costs_from_timeline(timeline_from_trace(spans))
    assert costs.forward == [1, 1]
    assert costs.backward == [2, 2]
    assert costs.communication == [0.5, 0]
    assert costs.backward_weight == [0, 0]


def test_a_part_of_a_run_is_enough():
    ran = simulate(PipeDream().actions(2, 4, steps=3), COSTS_OF_TWO)
    some = [rank[3:-2] for rank in spans_of(ran)]
    assert costs_from_timeline(timeline_from_trace(some)).forward == [1, 1]
    assert np.isfinite(timeline_from_trace(some).bubble)


def test_no_spans_are_refused():
    with pytest.raises(ValueError, match=r"at least one action, got none: run trainer\.step first"):
        timeline_from_trace([[], []])
