"""The examples run and interrupted as by a user: each is as good as its baseline."""

import subprocess
import sys

import pytest

from tests.examples.as_user import (
    assert_ctrl_c_ends_all,
    load_line,
    numbers,
    observe_example,
    run_example,
)

pytestmark = pytest.mark.slow  # test_examples.py has short runs


@pytest.mark.nightly
def test_digits_are_learned_as_well_as_by_all_reduce(tmp_path, subtests):
    for script, arguments in [
        ("gossip.py", ["--algorithm", "osgp"]),
        ("subnets.py", []),
        ("ddp_compression.py", []),
    ]:
        with subtests.test(script, arguments=arguments):
            result, rows = run_example(script, 4, "--out", tmp_path, *arguments)
            assert "100%" in result.stderr
            shown = "test accuracy" if script == "subnets.py" else "loss="
            assert shown in result.stderr  # beside the bar
            untrained, exact, ours = numbers(rows["test accuracy"])
            assert untrained < 30
            assert min(exact, ours) > 95
            assert abs(exact - ours) <= 2
            exact, ours = numbers(rows["kB a rank sends per step"])
            assert ours < 0.8 * exact


@pytest.mark.nightly
def test_a_gan_learns_as_well_as_by_all_reduce(tmp_path):
    _, rows = run_example("gan.py", 4, "--algorithm", "osgp", "--out", tmp_path)
    untrained, exact, ours = numbers(rows["distance to held-out digits"])
    assert untrained > 10
    assert max(exact, ours) < 3
    exact, ours = numbers(rows["kB a rank sends per step"])
    assert ours < 0.8 * exact


@pytest.mark.nightly
def test_the_text_is_learned_as_well_as_by_a_pipeline_that_empties(tmp_path, subtests):
    for schedule, copies in [("pipeoptim", "2 1"), ("interlocking", "1 1")]:
        with subtests.test(schedule):
            _, rows = run_example("pipeline.py", 2, "--schedule", schedule, "--out", tmp_path)
            untrained, exact, ours = numbers(rows["held-out bits per byte"])
            assert 7.5 < untrained < 8.5
            assert exact < 3.5
            assert ours < exact + 0.15
            assert rows["weight copies by stage"] == ["1 1", copies]


@pytest.mark.nightly
def test_a_pipeline_of_any_number_of_ranks_saves_one_model(tmp_path, subtests):
    for num_ranks in (1, 3):
        with subtests.test(num_ranks):
            result, _ = run_example("pipeline.py", num_ranks, "--steps", 4, "--out", tmp_path)
            check = "assert sum(p.numel() for p in model.parameters()) == 257728"
            line = f"{load_line(result.stdout)}; {check}"
            subprocess.run([sys.executable, "-c", line], check=True)


def test_a_bad_argument_is_one_error(tmp_path):
    result = observe_example("gossip.py", 3, "--epochs", "0", "--out", tmp_path)
    assert result.returncode != 0
    assert result.stderr.count("--epochs: must be a positive integer, got 0") == 1


def test_ctrl_c_ends_all_ranks(tmp_path, subtests):
    for script, num_ranks, length, shown in [
        ("gossip.py", 4, "--epochs", b"all-reduce:"),
        ("pipeline.py", 2, "--steps", b"1f1b:"),
    ]:
        with subtests.test(script):
            arguments = [length, 100000, "--out", tmp_path]
            assert_ctrl_c_ends_all(script, num_ranks, *arguments, shown=shown)
