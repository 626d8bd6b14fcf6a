"""Threshold: all large entries, possibly none."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.theory.contraction import contraction
from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Collectives,
    CompressorState,
    CorruptMessageError,
    ErrorFeedback,
    Threshold,
)
from tests.compression.means import gradient

NUMEL = 500
NAN, INF = float("nan"), float("inf")


def start(numel=NUMEL):
    return CompressorState(BufferLayout.flat(numel))


def send(x, residual=None, threshold=1.0):
    compressor, state = Threshold(threshold), start(len(x))
    message = compressor.compress(x, state, residual)
    return compressor.decompress(message, state.layout, torch.empty_like(x))


def test_all_entries_of_at_least_the_threshold_are_sent():
    x = torch.tensor([0.5, -1.0, 0.999, 1.0, -7.0, 0.0])
    values, indices = Threshold(1.0).compress(x, start(6))
    assert values.tolist() == [-1, 1, -7]
    assert indices.tolist() == [1, 3, 4]
    assert indices.dtype == torch.int32


def test_a_message_may_be_empty(subtests):
    for numel in [0, 1, NUMEL]:
        with subtests.test(str(numel)):
            state = start(numel)
            message = Threshold(100.0).compress(torch.ones(numel), state)
            assert [each.numel() for each in message] == [0, 0]
            assert not Threshold(100.0).decompress(message, state.layout, torch.ones(numel)).any()


def test_small_entries_are_kept_until_they_are_large(subtests):
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        with subtests.test(str(dtype)):
            compressor = ErrorFeedback(Threshold(1.0))
            state = compressor.init(BufferLayout.flat(NUMEL), torch.device("cpu"))
            sent, given = torch.zeros(NUMEL), torch.zeros(NUMEL)
            for step in range(8):
                x = (gradient(0, step, NUMEL) / 3).to(dtype)
                message = compressor.compress(x, state)
                assert message[0].dtype == dtype
                compressor.decompress(message, state.layout, sent, accumulate=True)
                given += x
                assert state.entries["residual"].abs().max() < 1
            torch.testing.assert_close(sent + state.entries["residual"], given, rtol=0, atol=1e-5)
            assert sent.any()


def test_float16_overflow_propagates_but_is_not_kept():
    x, residual = torch.full((4,), 6e4, dtype=torch.float16), torch.full((4,), 6e4)
    assert send(x, residual).isinf().all()
    assert not residual.any()


def test_a_threshold_must_be_finite_and_positive(subtests):
    for threshold in [0, -1.0, NAN, INF]:
        raises = pytest.raises(ValueError, match="threshold must be finite and > 0")
        with subtests.test(str(threshold)), raises:
            Threshold(threshold)


def test_it_needs_variable_lengths():
    assert not Threshold(1.0).fixed_length
    assert contraction(Threshold(1.0), BufferLayout.flat(3)) is None
    for place in (AttachPoint.DDP, AttachPoint.PIPELINE, AttachPoint.FSDP_GRADIENTS):
        assert Threshold(1.0).validation_error(place) is None
    assert "messages of fixed length" in Threshold(1.0).validation_error(AttachPoint.GOSSIP)


class SpoilingCollectives(Collectives):
    """Collectives in which rank 1 sends indices outside of any buffer."""

    def all_gather_uneven(self, tensors):
        values, indices = tensors
        return super().all_gather_uneven([values, indices + 10**6 * (self.rank == 1)])


def check_on_rank(rank):
    x = gradient(rank, 0, NUMEL)
    dense = x.clone()
    dist.all_reduce(dense)
    Threshold(1e-30).mean_(x, start(), Collectives())
    torch.testing.assert_close(x, dense / 3)
    if rank == 2:
        x.zero_()  # whose message is empty
    Threshold(0.01).mean_(x, start(), Collectives())
    with pytest.raises(CorruptMessageError, match="corrupt one from rank 1"):
        Threshold(0.01).mean_(x, start(), SpoilingCollectives())


def test_means_over_ranks(ranks):
    ranks.run(3, check_on_rank)
