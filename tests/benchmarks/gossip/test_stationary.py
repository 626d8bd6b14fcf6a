"""Where leaders and averages come to rest."""

import pytest

from benchmarks.gossip import stationary
from benchmarks.harness.rows import read_rows


def test_leaders_keep_the_stationary_points_that_averages_move():
    (_, losses, starts, rate, _), (_, quadratics, zeros, small, _) = stationary.problems()
    found = {
        method: stationary.run(losses, starts, rate, method, 0.2, 400)
        for method in ("EASGD", "LeaderSGD")
    }
    assert found["EASGD"]["gradient_evaluated"] > 0.1 < found["EASGD"]["gradient_of_a_rank"]
    assert found["LeaderSGD"]["gradient_evaluated"] < 1e-6
    own = stationary.run(quadratics, zeros, small, "LeaderSGD", 0.2, 400)
    assert own["gradient_of_a_rank"] < 0.1 < own["gradient_evaluated"]


@pytest.mark.slow
def test_the_program_writes_rows(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    monkeypatch.setattr("sys.argv", ["stationary", "--steps", "3", "--out", str(path)])
    stationary.main()
    rows = read_rows(path)
    assert len(rows) == 2 * 2 * 3
    assert set(rows[0]) == set(stationary.FIELDS)
