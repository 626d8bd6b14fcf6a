"""A sequence on two ranks: all methods learn the same, and count what attention sends."""

import pytest

from benchmarks.harness.link import loopback
from benchmarks.sequence.slow_link import GATHER, METHODS, Run, perform
from benchmarks.sequence.table import by_method


@pytest.mark.slow  # imports transformers in each rank
def test_every_method_learns_the_same_and_counts_its_bytes():
    rows = {}
    for method in METHODS:
        run = Run("100 Mbit/s", method, 0, steps=3, window=64)
        rows[method] = perform(run, loopback()) | run._asdict()
    plain = float(rows[GATHER]["training_bits"])
    for row in rows.values():
        assert float(row["training_bits"]) == pytest.approx(plain, rel=2e-3)
    numel = 2 * 2 * 32 * 64  # of k and v of a rank, in two layers
    float32, int8, gathered = (1e6 * float(row["mb_per_step"]) for row in rows.values())
    assert float32 == pytest.approx(3 * 4 * numel, rel=0.02)  # forward, backward, gradients
    assert gathered == pytest.approx(2 * 4 * numel, rel=0.02)
    assert int8 == pytest.approx((1 + 1 + 4) * numel, rel=0.05)
    table = by_method([{name: str(value) for name, value in row.items()} for row in rows.values()])
    assert len(table.splitlines()) == 2 + len(METHODS)
