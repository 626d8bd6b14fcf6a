"""The compiled event loop is bitwise equal to the one in Python."""

import random
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyparallel.pipeline import OneForwardOneBackward, PipelineShape
from pyparallel.planning.pipelines import Costs, tabulate
from pyparallel.planning.pipelines.event_loop import (
    COMPILED,
    load_compiled,
    run,
    run_reference,
    run_table,
)
from tests.pipeline.every_schedule import EVERY_SCHEDULE

compiled = COMPILED.loop
needs_compiled = pytest.mark.skipif(compiled is None, reason="the event loop is not built")


def both(table, costs):
    sizes = costs.durations(table.num_stages), costs.latencies(table.num_stages)
    return [run_table(table, *sizes, loop) for loop in (run_reference, compiled)]


def assert_equal(table, costs):
    reference, native = both(table, costs)
    np.testing.assert_array_equal(native[1], reference[1])
    np.testing.assert_array_equal(native[0], reference[0])  # NaN equals NaN
    return reference[1].sum() == len(table.rows)


def some_costs(draw, num_stages):
    times = st.lists(st.floats(0, 10), min_size=num_stages, max_size=num_stages)
    return Costs(*(draw(times) for _ in fields(Costs)))


@needs_compiled
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_on_every_schedule_with_any_costs(data):
    schedule = data.draw(st.sampled_from(EVERY_SCHEDULE))
    ranks, per_rank = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    microbatches, steps = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    actions = schedule.actions(ranks * per_rank, microbatches, ranks, steps)
    assert assert_equal(tabulate(actions), some_costs(data.draw, ranks * per_rank))


@needs_compiled
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_on_shuffled_actions(data):
    """Most of these lists, with swaps within ranks, deadlock at some point."""
    schedule = data.draw(st.sampled_from(EVERY_SCHEDULE))
    num_ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    actions = [list(rank) for rank in schedule.actions(2 * num_ranks, microbatches, num_ranks)]
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(0, 6))):
        rank = chance.choice(actions)
        i, j = chance.randrange(len(rank)), chance.randrange(len(rank))
        rank[i], rank[j] = rank[j], rank[i]
    assert_equal(tabulate(actions), some_costs(data.draw, 2 * num_ranks))


@needs_compiled
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_on_any_actions_that_do_not_repeat(data):
    """Incomplete lists, which the simulator would refuse: the loop must terminate."""
    actions = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))
    chosen = data.draw(st.lists(actions, min_size=1, max_size=40, unique=True))
    rank_of_stage = data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    ranks = [[action for action in chosen if rank_of_stage[action[0]] == rank] for rank in range(3)]
    # Either a full backward or the parts of a split one.
    split = {(stage, microbatch) for stage, kind, microbatch in chosen if kind == 1}
    ranks = [
        [(s, k, m) for s, k, m in rank if (s, m) not in split or k not in {2, 3}] for rank in ranks
    ]
    table = tabulate(ranks)
    assert_equal(table, some_costs(data.draw, table.num_stages))


def test_only_some_shuffled_actions_deadlock():
    # So that the test above compares both outcomes.
    ordered, swapped = OneForwardOneBackward().actions(2, 3), OneForwardOneBackward().actions(2, 3)
    swapped = [list(reversed(rank)) for rank in swapped]
    for actions, runs in [(ordered, True), (swapped, False)]:
        table = tabulate(actions)
        sizes = Costs().durations(2), Costs().latencies(2)
        _, done = run_table(table, *sizes, run_reference)
        assert (done.sum() == len(table.rows)) == runs


@needs_compiled
def test_a_long_run():
    shape = PipelineShape(8, 5_000, 8)
    table = tabulate(OneForwardOneBackward().rank_actions(shape, rank) for rank in range(8))
    costs = Costs()
    starts, done = run_table(table, costs.durations(8), costs.latencies(8), compiled)
    assert done.sum() == len(table.rows)
    assert starts.max() == 3 * (5_000 + 7)


def arrays(**changes):
    table = tabulate(OneForwardOneBackward().actions(2, 2))
    given_ = {
        "rows": table.rows,
        "offsets": table.offsets,
        "rank_of_stage": table.rank_of_stage,
        "durations": Costs().durations(2)[:5],
        "latencies": Costs().latencies(2),
        "num_microbatches": 2,
    }
    return given_ | changes


BAD_ARRAYS = [
    ({"rows": np.array([[2, 0, 0]] * 10, np.int32)}, "rows must lie within"),
    ({"rows": np.array([[0, 5, 0]] * 10, np.int32)}, "rows must lie within"),
    ({"rows": np.array([[0, 0, 2]] * 10, np.int32)}, "rows must lie within"),
    ({"rows": np.array([[0, 0, -1]] * 10, np.int32)}, "rows must lie within"),
    ({"rows": np.zeros((10, 2), np.int32)}, "shapes of an ActionTable"),
    ({"offsets": np.array([0, 5, 11])}, "offsets must ascend"),
    ({"offsets": np.array([0, 11, 10])}, "offsets must ascend"),
    ({"offsets": np.array([], np.int64)}, "shapes of an ActionTable"),
    ({"rank_of_stage": np.array([0, 2])}, "rank_of_stage must name ranks below 2, got 2"),
    ({"durations": np.ones((4, 2))}, "shapes of an ActionTable"),
    ({"latencies": np.ones(3)}, "shapes of an ActionTable"),
    ({"num_microbatches": -1}, "shapes of an ActionTable"),
]


@needs_compiled
def test_the_compiled_loop_never_reads_beyond_its_arrays(subtests):
    for changes, sentence in BAD_ARRAYS:
        with subtests.test(changes=changes):
            compiled(**arrays())
            with pytest.raises(ValueError, match=sentence):
                compiled(**arrays(**changes))


def test_what_is_not_built_or_does_not_load_is_said(tmp_path):
    reason = load_compiled(tmp_path).unavailable_reason
    assert reason.startswith("not built: the package is used without")
    (tmp_path / "build.json").write_text('{"simulate": "not built: pybind11 not found"}')
    assert load_compiled(tmp_path).unavailable_reason == "not built: pybind11 not found"
    (tmp_path / "build.json").write_text('{"simulate": "built with GNU 12"}')
    found = load_compiled(tmp_path)
    assert found.unavailable_reason == "built with GNU 12, for another Python"
    found.path.write_text("no library")
    broken = load_compiled(tmp_path)
    assert broken.unavailable_reason.startswith("built, but it does not load: ")
    assert broken.loop is None


@needs_compiled
def test_the_simulator_runs_on_the_compiled_loop():
    assert run is compiled
