"""The benchmark of sketches on quadratics: its curves, rows and picture."""

import pytest
import torch

from benchmarks.harness.pictures import drawn
from benchmarks.harness.rows import read_rows
from benchmarks.subnets import compare_sketches
from benchmarks.subnets.compare_sketches import FIELDS, make_problem, run, sample, sketch_methods
from benchmarks.subnets.picture import PICTURES


def find(name, problem):
    return next(each for each in sketch_methods(problem) if each.name == name)


@pytest.mark.slow
def test_gradient_descent_reaches_the_solution():
    problem = make_problem(3, 3)
    method = find("whole", problem)
    (curves,) = run(method, problem.solution, [method.largest_step], 3000, 1)
    assert curves.to_solution == curves.to_limit
    assert curves.to_solution[0] == 1
    assert curves.to_solution[-1] < 1e-6


def test_preconditioning_changes_the_step_size_and_not_the_limit():
    problem = make_problem(4, 3)
    first, second = (find(name, problem) for name in ("plain", "preconditioned"))
    torch.testing.assert_close(first.limit, second.limit)
    expected = problem.slopes.mean(0) / (4 * problem.mean_curvature.diagonal())
    torch.testing.assert_close(first.limit, expected)
    assert first.largest_step < second.largest_step


@pytest.mark.slow
def test_smaller_steps_come_closer_to_the_limit_but_not_to_the_solution():
    problem = make_problem(2, 3)
    for name in ("preconditioned", "heterogeneous"):
        method = find(name, problem)
        steps = [method.largest_step, 0.05 * method.largest_step]
        large, small = run(method, problem.solution, steps, 200, 2)
        assert len(small.to_limit) == 201, name
        late = [sum(curves.to_limit[-100:]) for curves in (large, small)]
        assert late[1] < late[0], name
        away = (method.limit - problem.solution).norm() / problem.solution.norm()
        assert small.to_solution[-1] == pytest.approx(float(away), abs=0.2), name


def test_recorded_rounds_are_denser_at_first():
    rounds = sample(300)
    assert rounds[:4] == [0, 1, 2, 3]
    assert rounds[-1] == 300
    assert rounds == sorted(set(rounds))
    assert sample(1) == [0, 1]


def test_the_program_writes_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    arguments = ["--ranks", "2", "3", "--rounds", "4", "--runs", "1", "--out", str(path)]
    monkeypatch.setattr("sys.argv", ["compare_sketches", *arguments])
    compare_sketches.main()
    rows = read_rows(path)
    assert len(rows) == 2 * 10
    assert set(rows[0]) == set(FIELDS)
    assert drawn(PICTURES, rows, tmp_path) == ["to-solution", "to-limit"]
    assert capsys.readouterr().out.count("limit_to_solution ") == 20
