"""The comparison of two checkouts measures every case in both."""

import pytest

from benchmarks import checkouts


@pytest.mark.slow  # two processes for each case
@pytest.mark.nightly
def test_a_checkout_is_compared_with_itself(monkeypatch, tmp_path, capsys):
    found = checkouts.run(checkouts.ROOT)
    assert len(found) > 15
    assert all(value > 0 for _, value in found.values())
    monkeypatch.setattr("benchmarks.harness.rows.RESULTS", tmp_path)
    pairs = {(case, unit): [(1.0, 2.0), (1.0, 4.0)] for case, (unit, _) in found.items()}
    checkouts.write(pairs, checkouts.ROOT)
    (path,) = tmp_path.glob("checkouts-*.csv")
    rows = path.read_text().splitlines()
    assert len(rows) == 1 + len(found)
    assert "1,3,3,2,4,2," in rows[1]
