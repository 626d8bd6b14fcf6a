"""PermK: every entry comes from one rank, with the same probability for all ranks."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.theory.contraction import contraction
from pyparallel.comm import Run
from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Collectives,
    CompressorState,
    ErrorFeedback,
    PermK,
)
from tests.compression.means import gradient, send
from tests.workers import on_ranks

NAN, INF = float("nan"), float("inf")
CASES = [(1, 3), (2, 3), (7, 3), (50, 4), (1000, 4), (1000, 3), (1037, 3), (64, 1)]


def start(numel, rank=0):
    return CompressorState(BufferLayout.flat(numel), rank)


def test_the_mean_of_the_sketches_of_a_buffer_is_the_buffer(subtests):
    for numel, num_ranks in CASES:
        with subtests.test(f"{numel} {num_ranks}"):
            compressor, x = PermK(num_ranks=num_ranks), gradient(0, 0, numel)
            sent = torch.stack(
                [send(compressor, x, start(numel, rank)) for rank in range(num_ranks)]
            )
            assert (sent != 0).sum(0).eq(1).all(), "an entry must come from one rank"
            torch.testing.assert_close(sent.sum(0), x * num_ranks)
            lengths = (sent != 0).sum(1)
            assert lengths.max() - lengths.min() <= 32 + 32


def test_with_a_residual_nothing_is_scaled_and_nothing_is_lost():
    compressor, state = PermK(num_ranks=3), start(1037, 2)
    x, residual = gradient(0, 0, 1037), gradient(0, 1, 1037)
    total = x + residual
    sent = send(compressor, x, state, residual)
    assert torch.equal(sent + residual, total)
    assert 300 < (sent != 0).sum() < 400
    assert contraction(compressor, state.layout) == 1 / 3


def test_messages_have_one_length_though_shares_do_not():
    compressor, states = PermK(num_ranks=3), [start(1037, rank) for rank in range(3)]
    messages = [compressor.compress(gradient(0, 0, 1037), each) for each in states for _ in "abc"]
    assert {values.numel() for values, _ in messages} == {352 + 13}
    assert compressor.fixed_length


def test_a_single_message_needs_the_number_of_ranks():
    with pytest.raises(ValueError, match=r"num_ranks must be given.*PermK\(seed=5, num_ranks="):
        PermK(5).compress(torch.ones(3), start(3))
    assert PermK().error_at(AttachPoint.DDP) is None
    assert "num_ranks must be given" in PermK().error_at(AttachPoint.GOSSIP)
    assert PermK(num_ranks=4).error_at(AttachPoint.GOSSIP) is None
    assert contraction(PermK(), BufferLayout.flat(3)) is None
    with pytest.raises(ValueError, match="num_ranks must be >= 1"):
        PermK(num_ranks=0)


@on_ranks(3)
def test_means_over_ranks(rank):
    collectives = Collectives()
    for numel in (0, 1, 2, 50, 1037):
        own = gradient(rank, 0, numel)
        x = own.clone()
        PermK().mean_(x, start(numel, rank), collectives)
        rows = collectives.all_gather(own)
        assert (rows == x).any(0).all(), "an entry must come from one rank"
        same = gradient(0, 0, numel)
        PermK().mean_(x.copy_(same), start(numel, rank), collectives)
        assert torch.equal(x, same)
    collectives.stats.payload_bytes = 0
    PermK().mean_(x, start(1037, rank), collectives)
    assert collectives.stats.payload_bytes <= 4 * (1037 / 3 + 64)
    undeclared, x = gradient(rank, 0, 50), gradient(rank, 0, 50)
    PermK().mean_(undeclared, start(50, rank), collectives)
    PermK(num_ranks=2).mean_(x, start(50, rank), collectives)
    assert torch.equal(x, undeclared)
    check_density_1(dist.new_group([rank], use_local_synchronization=True))


def check_density_1(alone):
    """In a group of one, a share is the whole buffer."""
    x = gradient(0, 0, 100)
    ErrorFeedback(PermK()).mean_(
        x, ErrorFeedback(PermK()).init(BufferLayout.flat(100), x.device), Collectives(Run(alone))
    )
    assert torch.equal(x, gradient(0, 0, 100))
