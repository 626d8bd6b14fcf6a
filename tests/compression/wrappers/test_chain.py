"""Chain: entries chosen by the first, encoded by the second, with one residual for both."""

from itertools import product

import pytest
import torch

from benchmarks.theory.contraction import contraction
from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Cast,
    Chain,
    ChunkTopK,
    Collectives,
    ErrorFeedback,
    Int8,
    PermK,
    RandomK,
    Statistical,
    Threshold,
    TopK,
)
from pyparallel.compression.corrupt_messages import CorruptMessageError
from tests.compression.means import CPU, gradient, send
from tests.workers import on_ranks

NUMEL = 1000
NAN, INF = float("nan"), float("inf")
FIRSTS = [TopK(0.1), ChunkTopK(16, chunk=256), RandomK(0.1), Threshold(1.5), PermK(num_ranks=3)]
SECONDS = [Int8(block_size=32), Statistical(block_size=32), Cast(), Int8(block_size=32, seed=0)]
CHAINS = [Chain(first, second) for first in FIRSTS for second in SECONDS]


def start(compressor, numel=NUMEL):
    return compressor.init(BufferLayout.flat(numel), CPU)


def test_messages_and_residual_add_up(subtests):
    for chain, dtype in product(CHAINS, [torch.float32, torch.bfloat16]):
        with subtests.test(f"{chain} {dtype}"):
            state, residual = start(chain), torch.zeros(NUMEL)
            sent, given = torch.zeros(NUMEL), torch.zeros(NUMEL)
            for step in range(6):
                x = gradient(0, step, NUMEL).to(dtype)
                given += x
                sent += send(chain, x, state, residual)
            torch.testing.assert_close(sent + residual, given, rtol=0, atol=2e-5)
            assert sent.any()


def test_values_are_encoded_by_the_second():
    chain, x = Chain(TopK(0.1), Int8(block_size=32)), gradient(0, 0, NUMEL)
    codes, scales, indices = chain.compress(x, start(chain))
    assert (codes.numel(), scales.numel(), indices.numel()) == (100, 4, 100)
    sent = send(chain, x, start(chain))
    largest = x.abs().sort().values[-100:]
    torch.testing.assert_close(sent[indices.long()].abs().sort().values, largest, rtol=0, atol=0.02)


def test_both_draw_by_the_step_alone():
    """Pipelines need this: they set the step of a message."""
    chain, x = Chain(RandomK(0.1), Int8(block_size=32, seed=0)), gradient(0, 0, NUMEL)
    state = start(chain)
    first, _ = chain.compress(x, state), chain.compress(x, state)
    state.step = 0
    again = chain.compress(x, state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_properties_are_those_of_both():
    unbiased = Chain(RandomK(0.2), Int8(block_size=32, seed=0))
    assert unbiased.unbiased
    state, x = start(unbiased, 100), gradient(0, 0, 100)
    draws = torch.stack([send(unbiased, x, state) for _ in range(400)])
    assert ((draws.mean(0) - x).abs() <= 5 * (2 * x.abs() + 0.1) / 400**0.5).all()
    assert not Chain(TopK(0.2), Int8(seed=0)).unbiased
    assert not Chain(RandomK(0.2), Int8()).unbiased
    assert not Chain(Threshold(1.0), Int8()).fixed_length
    assert Chain(Threshold(1.0), Int8()).error_at(AttachPoint.GOSSIP)
    assert Chain(TopK(0.1), Int8()).error_at(AttachPoint.GOSSIP) is None


def test_the_declared_contraction_holds():
    chain = Chain(TopK(0.1), Cast())
    delta = contraction(chain, BufferLayout.flat(NUMEL))
    assert delta == 0.1 * contraction(Cast(), BufferLayout.flat(100))
    for x in (gradient(0, 0, NUMEL), torch.ones(NUMEL), gradient(0, 1, NUMEL) ** 9):
        lost = x - send(chain, x, start(chain))
        assert lost.square().sum() <= (1 - delta) * x.square().sum() * (1 + 1e-6)
    assert contraction(Chain(Threshold(1.0), Cast()), BufferLayout.flat(NUMEL)) is None
    assert contraction(Chain(TopK(0.1), Cast(torch.float16)), BufferLayout.flat(NUMEL)) is None


def test_invalid_chains_are_rejected(subtests):
    for first, second, sentence in [
        (Int8(), Int8(), "first must be a sparsifier"),
        (ErrorFeedback(TopK(0.1)), Int8(), "wrap the Chain"),
        (TopK(0.1), TopK(0.1), "second must be a blockwise compressor"),
        (TopK(0.1), ErrorFeedback(Int8()), "second must be a blockwise compressor"),
    ]:
        with subtests.test(f"{first} {second}"), pytest.raises(ValueError, match=sentence):
            Chain(first, second)


@on_ranks(3)
def test_means_over_ranks(rank):
    chain, x = Chain(RandomK(1.0), Int8()), gradient(rank, 0, NUMEL)
    dense, collectives = x.clone(), Collectives()
    Int8().mean_(dense, start(Int8()), collectives)
    chain.mean_(x, start(chain), collectives)
    assert torch.equal(x, dense), "at full density the values are the buffer"
    collectives.stats.payload_bytes = 0
    Chain(RandomK(0.1), Int8()).mean_(x, start(chain), collectives)
    assert collectives.stats.payload_bytes == 2 * (100 + 4) + 8, (
        "no indices, one byte per code, encoded twice"
    )


@pytest.mark.parametrize("compressor", [ChunkTopK(), Chain(ChunkTopK(), Statistical())])
def test_sums_of_chunks_equal_messages_one_by_one(compressor):
    numel = 10_000
    layout = BufferLayout.flat(numel)
    messages = [
        compressor.compress(gradient(i, 0, numel), start(compressor, numel)) for i in (0, 1)
    ]
    for dtype in (torch.float32, torch.bfloat16):
        total, x = torch.zeros(numel), torch.ones(numel, dtype=dtype)
        for each in messages:
            compressor.decompress(each, layout, total, accumulate=True)
        compressor._add_up_(messages, layout, x, divisor=2)
        assert torch.equal(x, (total / 2).to(dtype))
    messages[1][-1].fill_(255)
    with pytest.raises(CorruptMessageError, match="from rank 1"):
        compressor._add_up_(messages, layout, x, divisor=2)


def test_sparseloco_takes_a_quarter_of_a_bit_an_entry():
    chain, numel = Chain(ChunkTopK(), Statistical()), 1_000_000
    message = chain.compress(gradient(0, 0, numel), start(chain, numel))
    bits = 8 * sum(part.nbytes for part in message) / numel
    assert 14 * 64 / 4096 <= bits <= 0.25
    assert bits == pytest.approx(14 * 64 / 4096, rel=0.01)
