"""The minutes of the recipes: each method trains, and its row says what was sent."""

import pytest

from benchmarks.harness.link import loopback
from benchmarks.language_models.recipes import METHODS, TORCH, Run, perform
from benchmarks.language_models.table import by_link


@pytest.mark.slow  # imports transformers in each rank
def test_every_method_trains_and_counts_its_bytes():
    rows = {}
    for method in METHODS:
        run = Run("100 Mbit/s", method, 0, seconds=1.0)
        rows[method] = perform(run, loopback()) | run._asdict()
    assert {row["parameters"] for row in rows.values()} == {rows["ddp"]["parameters"]}
    assert float(rows["ddp"]["bits_per_parameter"]) == 48  # twice three quarters of 32
    assert float(rows["compressed"]["bits_per_parameter"]) < 4
    assert float(rows["gossip"]["bits_per_parameter"]) == pytest.approx(32, rel=0.01)
    assert rows[TORCH]["bits_per_parameter"] == ""
    assert all(float(row["held_out_bits"]) < 9 for row in rows.values())
    table = by_link([{name: str(value) for name, value in row.items()} for row in rows.values()])
    assert len(table.splitlines()) == 2 + len(METHODS)
