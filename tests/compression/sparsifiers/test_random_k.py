"""RandomK: shared draws, both scalings, and means that are all-reduces of the values."""

import pytest
import torch

from benchmarks.theory.contraction import contraction
from pyparallel import ops
from pyparallel.compression import BufferLayout, RandomK
from pyparallel.planning.simulate import SingleRankCollectives
from tests.compression.means import CPU, gradient, send

NUMEL = 1000
NAN, INF = float("nan"), float("inf")


def start(compressor, numel=NUMEL, rank=0):
    return compressor.init(BufferLayout.flat(numel), CPU, rank)


def test_with_a_residual_entries_are_not_scaled_and_the_rest_is_kept():
    compressor = RandomK(0.1)
    state, x, residual = start(compressor), gradient(0, 0, NUMEL), gradient(0, 1, NUMEL)
    total = x + residual
    sent = send(compressor, x, state, residual)
    assert (sent != 0).sum() == 100
    assert torch.equal(sent + residual, total)
    assert not (sent * residual).any()
    assert contraction(compressor, state.layout) == 0.1


def test_a_message_can_be_decoded_at_any_step():
    compressor = RandomK(0.05)
    state, x = start(compressor), gradient(0, 0, NUMEL)
    for step in range(1, 4):
        values, number = compressor.compress(x, state)
        assert number.tolist() == [step]
        read = compressor.decompress((values, number), state.layout, torch.ones(NUMEL))
        indices = ops.random_k_indices(
            NUMEL, 50, seed=state.seed(0, shared=True), offset=step, run_length=32
        ).long()
        torch.testing.assert_close(read[indices], x[indices] * 20)
        assert (read != 0).sum() == 50


def test_large_finite_entries_do_not_become_nan():
    x = torch.full((NUMEL,), 3e38)
    assert not send(RandomK(0.01), x, start(RandomK(0.01)), torch.zeros(NUMEL)).isnan().any()


def test_density_must_be_in_0_1(subtests):
    for density in [0, -0.1, 1.5, NAN]:
        raises = pytest.raises(ValueError, match=r"density must be in \(0, 1\]")
        with subtests.test(str(density)), raises:
            RandomK(density)


def test_run_length_must_be_positive(subtests):
    for run_length in [0, -3, 2.5]:
        raises = pytest.raises(ValueError, match="run_length must be a positive integer")
        with subtests.test(str(run_length)), raises:
            RandomK(0.1, run_length=run_length)


def test_a_mean_sends_values_alone():
    collectives = SingleRankCollectives(3)
    RandomK(0.1).mean_(gradient(0, 0, NUMEL), start(RandomK(0.1)), collectives)
    assert collectives.stats.payload_bytes == 400
