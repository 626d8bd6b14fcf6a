"""The comparison of algorithms: its rows, tables and pictures."""

import math

import pytest

from benchmarks.gossip import compare
from benchmarks.gossip.compare import FIELDS, Run
from benchmarks.gossip.tasks import columns_of
from benchmarks.harness.tables import MEASURES, differences

DIGITS, TEXT = MEASURES


def make_row(data="digits", algorithm="sgp", seed=0, score=0.9, steps=3):
    ranks = [
        {"options": f"{algorithm}()", "losses": [1.0] * steps, "measure": "a measure",
         "score": score, "score_of_rank": of_rank, "consensus_distance": 1e-3, "step_bytes": 2000.0}
        for of_rank in (score, score - 0.1)
    ]  # fmt: skip
    key = dict(zip(FIELDS, (data, algorithm, str(seed)), strict=False))
    return key | columns_of(data, ranks) | {"losses": "2.0 1.0"}


def test_the_worst_rank_is_the_least_accurate_or_has_most_bits():
    assert make_row("digits", score=0.9)["worst_rank"] == "0.80000"
    assert make_row("text", score=2.0)["worst_rank"] == "2.00000"


def test_differences_are_by_seed_at_equal_numbers_of_steps():
    exact = [make_row(algorithm="allreduce", seed=seed, score=0.8) for seed in (0, 1)]
    ours = [make_row(seed=0, score=0.81), make_row(seed=1, steps=9), make_row(seed=2)]
    assert differences(ours, exact, DIGITS) == pytest.approx([1])
    assert differences(ours[:1], exact, TEXT) == pytest.approx([1.25])


@pytest.mark.slow  # two trainings of two processes
def test_a_run_learns_and_reports(subtests):
    for data, algorithm, steps, of_chance in [
        ("digits", "leadersgd", 47, 0.2),  # two ranks have 45 batches each: a second epoch begins
        ("text", "sgp-overlap-1", 25, 8.0),
    ]:
        with subtests.test(data):
            row = compare.perform(Run(data, algorithm, 0, steps, ranks=2))
            assert {*row} == {*FIELDS[3:]} - {"torch", "commit"}
            assert (row["steps"], row["ranks"]) == (str(steps), "2")
            better = float(row["score"]) - of_chance
            assert better > 0.05 if data == "digits" else better < -1.5
            assert float(row["worst_rank"]) > 0
            assert float(row["step_bytes"]) > 1000
            losses = [float(loss) for loss in row["losses"].split()]
            assert losses[0] > losses[-1]
            assert all(map(math.isfinite, losses))
