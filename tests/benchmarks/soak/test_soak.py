"""The program of ``make soak`` finds planted leaks, and runs a few steps; it is long itself."""

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.harness.rows import read_rows
from benchmarks.soak import trainers
from benchmarks.soak.__main__ import FIELDS, FLAT, PARTS, parse, run_case
from benchmarks.soak.rounds import find_problems
from benchmarks.soak.watch import BOUND_KB, Sample, judge, watch
from tests.cases import nightly

ROOT = Path(__file__).resolve().parents[3]
STEPS = 2000


def samples(rss_kb=lambda step: 1000, fds=lambda step: 20, threads=lambda step: 5):
    counts = range(0, STEPS + 1, STEPS // 50)
    return [Sample(step, int(rss_kb(step)), fds(step), threads(step)) for step in counts]


def test_what_grows_is_a_problem_and_nothing_else():
    for found, problem in [
        (samples(rss_kb=lambda step: 1000 + 1.2 * BOUND_KB / 1000 * step), "memory grew by 120 kB"),
        (samples(fds=lambda step: 20 + step // 100), "fds grew from 30 to 38"),
        (samples(threads=lambda step: 5 + (step > 1500)), "threads grew from 5 to 6"),
    ]:
        assert [each.startswith(problem) for each in judge(found).problems] == [True], problem
    for found in [
        samples(),
        samples(rss_kb=lambda step: 1000 + 0.8 * BOUND_KB / 1000 * step),
        samples(rss_kb=lambda step: 1000 + 50 * (step % 3)),
        samples(rss_kb=lambda step: 1000 + 2000 * (step > 1400)),  # a single jump
        # Grows during the warm-up only.
        samples(lambda step: min(step, 700), lambda step: min(step, 700), lambda step: step > 700),
        samples(rss_kb=lambda step: 2000 - step, fds=lambda step: 50 - step // 50),
    ]:
        report = judge(found)
        assert not report.problems
        assert report.growth_kb is not None


def test_a_run_too_short_to_fit_has_no_rate_of_growth():
    found = [Sample(step, 1000 * step, 20, 5) for step in range(0, 1500, 10)]
    assert judge(found).growth_kb is None
    assert not judge(found).problems


@pytest.mark.slow  # 4000 steps
def test_planted_leaks_of_this_process_are_found():
    kept, event = [], threading.Event()

    def leak(index):
        page = mmap.mmap(-1, 4096)  # not from memory that was freed before
        page[0] = 1
        kept.append(page)
        if index % 100 == 0:
            kept.append(os.open(os.devnull, os.O_RDONLY))
            threading.Thread(target=event.wait).start()

    try:
        report = judge(watch(leak, STEPS))
    finally:
        event.set()
        for each in kept:
            if isinstance(each, int):
                os.close(each)
    assert [each.split()[0] for each in report.problems] == ["fds", "threads", "memory"]
    assert report.growth_kb == pytest.approx(4096, rel=0.25)
    assert not judge(watch(lambda index: bytearray(4096), STEPS)).problems


def test_mass_that_is_lost_is_a_problem():
    lost = {"weight_error": 1e-3, "sum_error": float("nan")}
    assert [each.split()[0] for each in find_problems(lost, 20_000)] == [*lost]
    assert find_problems({"weight_error": 1e-13, "sum_error": 1e-4}, 20_000) == []


@pytest.mark.slow  # two runs of ranks
def test_a_few_rounds_and_steps_are_flat():
    cases = [("rounds", "Star, Int8", 3, 200), ("steps", "SGP, overlap=1", 2, 50)]
    for case in cases:
        row = run_case(*case, 60)
        assert row["verdict"] == FLAT
        assert {*row} <= {*FIELDS}
    assert float(row["late_rss_kb"]) > 0


@pytest.mark.slow
def test_a_case_past_its_time_limit_fails():
    verdict = run_case("steps", "SGP", 2, 10**7, 6)["verdict"]
    assert verdict.startswith("failed: rank")
    assert "ended without a result" in verdict


def test_unknown_cases_are_an_error(capsys):
    with pytest.raises(SystemExit):
        parse(["--out", "rows.csv", "--part", "rounds", "--only", "ADPSGD"])
    assert "--only must begin the name of a case, got 'ADPSGD': Star" in capsys.readouterr().err


def run_trainers(rank, cases):
    return {case: len(trainers.run(rank, case, 20)[0]) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [nightly(2), 4])
def test_every_trainer_runs(ranks, num_ranks):
    cases = [case for case in trainers.STARTS if trainers.ranks_of(case) == num_ranks]
    for found in ranks.run(num_ranks, run_trainers, cases, time_limit=120):
        assert [*found] == cases
        assert min(found.values()) > 1


@pytest.mark.nightly
@pytest.mark.slow
def test_the_dry_run_has_a_row_for_every_chosen_case(tmp_path):
    path, chosen = tmp_path / "rows.csv", ("Star, ", "Hierarchical", "PipeOptim", "compress_fsdp")
    command = [sys.executable, "-m", "benchmarks.soak", "--part", *PARTS, "--only", *chosen]
    done = subprocess.run(
        [*command, "--dry-run", "--out", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(path)
    assert [(row["part"], row["case"], row["ranks"]) for row in rows] == [
        (name, case, str(number))
        for name, part in PARTS.items()
        for case, numbers in part.cases.items()
        for number in numbers
        if case.startswith(chosen)
    ]
    assert {row["verdict"] for row in rows} == {FLAT}
