"""RandomK: shared draws, both scalings, and means that are all-reduces of the values."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.theory.contraction import contraction
from pyparallel import ops
from pyparallel.compression import (
    BufferLayout,
    Collectives,
    CompressorState,
    CorruptMessageError,
    ErrorFeedback,
    RandomK,
)
from tests.compression.means import CPU, assert_same_bits, check_means, gradient
from tests.workers import run_ranks

NUMEL = 1000
NAN, INF = float("nan"), float("inf")


def send(compressor, x, state, residual=None):
    message = compressor.compress(x, state, residual)
    return compressor.decompress(message, state.layout, torch.empty_like(x))


def start(compressor, numel=NUMEL, rank=0):
    return compressor.init(BufferLayout.flat(numel), CPU, rank)


def test_it_is_unbiased_without_a_residual(subtests):
    for run_length in [1, 32]:
        with subtests.test(str(run_length)):
            compressor = RandomK(0.1, run_length=run_length)
            assert compressor.unbiased
            state, x = start(compressor, 200), gradient(0, 0, 200)
            draws = torch.stack([send(compressor, x, state) for _ in range(1500)])
            # Each entry is drawn with probability 0.1, times 10: the standard error is
            # 3 |x| / sqrt(1500).
            assert ((draws.mean(0) - x).abs() <= 5 * 3 * x.abs() / 1500**0.5).all()
            assert (draws != 0).sum(1).eq(20).all()


def test_with_a_residual_entries_are_not_scaled_and_the_rest_is_kept():
    compressor = RandomK(0.1)
    state, x, residual = start(compressor), gradient(0, 0, NUMEL), gradient(0, 1, NUMEL)
    total = x + residual
    sent = send(compressor, x, state, residual)
    assert (sent != 0).sum() == 100
    assert torch.equal(sent + residual, total)
    assert not (sent * residual).any()
    assert contraction(compressor, state.layout) == 0.1


def test_all_ranks_draw_the_same_and_every_message_differs():
    compressor = RandomK(0.1)
    states = [start(compressor, rank=rank) for rank in (0, 5)]
    first, second = (send(compressor, torch.ones(NUMEL), state) for state in states)
    assert torch.equal(first, second)
    assert not torch.equal(first, send(compressor, torch.ones(NUMEL), states[0]))
    other = RandomK(0.1, seed=1)
    assert not torch.equal(first, send(other, torch.ones(NUMEL), start(other)))


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


def test_at_full_density_a_buffer_of_any_length_is_sent(subtests):
    for numel in [0, 1, 31, 33]:
        with subtests.test(str(numel)):
            compressor = RandomK(1.0)
            x = gradient(0, 0, numel)
            assert torch.equal(send(compressor, x, start(compressor, numel)), x)


def test_narrow_values_are_sent_in_their_dtype_and_rounding_is_kept(subtests):
    for dtype in [torch.bfloat16, torch.float16]:
        with subtests.test(str(dtype)):
            compressor = RandomK(0.5)
            state, x = start(compressor), gradient(0, 0, NUMEL).to(dtype)
            residual = gradient(0, 1, NUMEL) / 100
            total = x.float() + residual
            values, number = compressor.compress(x, state, residual)
            assert values.dtype == dtype
            read = compressor.decompress((values, number), state.layout, torch.zeros(NUMEL))
            torch.testing.assert_close(read + residual, total, rtol=0, atol=1e-6)


def test_non_finite_entries_propagate_but_are_not_kept(subtests):
    for bad in [NAN, INF, -INF]:
        with subtests.test(str(bad)):
            compressor = RandomK(0.01)
            for place in range(0, NUMEL, 97):
                state, x, residual = start(compressor), gradient(0, 0, NUMEL), torch.zeros(NUMEL)
                x[place] = bad
                assert send(compressor, x, state, residual).isnan().sum() == 10
                assert residual.isfinite().all()
                assert send(compressor, x, state).isnan().any()


def test_large_finite_entries_do_not_become_nan():
    x = torch.full((NUMEL,), 3e38)
    assert not send(RandomK(0.01), x, start(RandomK(0.01)), torch.zeros(NUMEL)).isnan().any()


def test_corrupt_messages_are_rejected_before_anything_is_written(subtests):
    spoils = [
        lambda values, number: (values[1:], number),
        lambda values, number: (values.int(), number),
        lambda values, number: (values, number[:0]),
        lambda values, number: (values, number.int()),
        lambda values, number: (values, -number),
    ]
    for place, spoil in enumerate(spoils):
        with subtests.test(str(place)):
            compressor = RandomK(0.1)
            state = start(compressor)
            message = spoil(*compressor.compress(gradient(0, 0, NUMEL), state))
            out = torch.ones(NUMEL)
            with pytest.raises(CorruptMessageError, match="must be"):
                compressor.decompress(message, state.layout, out)
            assert out.eq(1).all()


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


def check_on_rank(rank):
    digests = check_means(rank, {"runs": RandomK(0.1), "single": RandomK(0.3, run_length=1)})
    collectives, x = Collectives(), gradient(rank, 0, NUMEL)
    dense = x.clone()
    dist.all_reduce(dense)
    RandomK(1.0).mean_(x, CompressorState(BufferLayout.flat(NUMEL)), collectives)
    assert torch.equal(x, dense / 3)
    collectives.stats.payload_bytes = 0
    RandomK(0.1).mean_(x, CompressorState(BufferLayout.flat(NUMEL)), collectives)
    assert collectives.stats.payload_bytes == 400
    return digests


def test_means_over_ranks():
    assert_same_bits(run_ranks(3, check_on_rank))


def test_repr_round_trips():
    row = ErrorFeedback(RandomK(0.1, seed=3, run_length=8))
    assert eval(repr(row)) == row
    assert row.fixed_length
