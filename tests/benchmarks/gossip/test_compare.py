"""The comparison of algorithms: its rows, tables and pictures."""

import math

import pytest

from benchmarks.gossip import compare, outer_steps, sharded
from benchmarks.gossip.compare import FIELDS, Run
from benchmarks.gossip.table import outer_steps as outer_table
from benchmarks.gossip.tasks import columns_of
from benchmarks.harness.ranks import run_on_loopback
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


def test_outer_steps_are_compared_at_the_rate_of_most_seeds():
    def row(algorithm, rate, seed, score, bits):
        columns = {
            "task": "bytes",
            "link": "100 Mbit/s",
            "algorithm": algorithm,
            "rate": rate,
            "seed": seed,
        }
        measured = {"score": score, "bits_per_parameter": bits, "waiting": "0.1", "seconds": "50"}
        return {**columns, **measured, "ranks": "4", "steps": "9"}

    ddp = [row("ddp", "0.02", seed, "2.0", "48") for seed in "01"]
    found = [("0.01", "0", "1.0"), ("0.02", "0", "2.2"), ("0.02", "1", "2.1")]
    *_, last = outer_table(
        [*ddp, *(row("sparseloco", *each, "0.5") for each in found)]
    ).splitlines()
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == [
        "sparseloco", "0.02", "2.150", "+10.0, +5.0 %", "0.5", "96x", "10.0 %", "50"
    ]  # fmt: skip


@pytest.mark.slow  # four processes
def test_outer_steps_learn_and_report():
    run = outer_steps.Run("bytes", "loopback", "noloco-sparse", 1e-2, 0, steps=25)
    for row in run_on_loopback(outer_steps.RANKS, 120, outer_steps.train, run):
        assert row["losses"][-1] < row["losses"][0]
        # Two outer steps: 14 bits for 64 of 4,096 entries, and of 1 in 16 all 32.
        assert row["bits_per_parameter"] == pytest.approx(2 * (14 / 64 + 32 / 16) / 25, rel=0.05)
        assert 0 < row["waiting"] < 1


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("method", ["HSDP, bfloat16", "SGP, overlap=1, Int8"])
def test_shards_learn_and_report(method):
    for row in run_on_loopback(4, 120, sharded.train, sharded.LinkRun("loopback", method, 0, 12)):
        assert row["losses"][-1] < row["losses"][0]
        assert row["parameters"] > 10**7
        assert row["bits"] > 4  # of the shards inside a node too, where both are on one interface
        assert row["peak_mib"] > 100
