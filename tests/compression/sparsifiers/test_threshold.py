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
    Threshold,
)
from tests.compression.means import gradient
from tests.workers import on_ranks

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
        assert Threshold(1.0).error_at(place) is None
    error_text = Threshold(1.0).error_at(AttachPoint.GOSSIP)
    assert "messages of fixed length" in error_text
    assert error_text.endswith("got Threshold(threshold=1.0); use one such as TopK(0.01)")


@on_ranks(3)
def test_a_rank_may_send_nothing(rank):
    x = gradient(rank, 0, NUMEL) if rank < 2 else torch.zeros(NUMEL)
    dense = x.clone()
    dist.all_reduce(dense)
    Threshold(1e-30).mean_(x, start(), Collectives())
    torch.testing.assert_close(x, dense / 3)
