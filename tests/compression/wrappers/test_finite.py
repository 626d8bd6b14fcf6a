"""Finite: all ranks raise if one has a nan or an inf."""

from itertools import product

import pytest
import torch

from benchmarks.theory.contraction import contraction
from pyparallel.compression import (
    AttachPoint,
    Cast,
    Collectives,
    ErrorFeedback,
    Finite,
    Int8,
    NonFiniteError,
    Threshold,
    TopK,
)
from tests.compression.means import (
    CPU,
    gradient,
    layout_of,
    residual_of,
)

NAN, INF = float("nan"), float("inf")
COMPRESSOR = Finite(ErrorFeedback(TopK(0.1)))


def test_only_compressors_can_be_wrapped(subtests):
    for wrapper, wrapped in product([ErrorFeedback, Finite], [TopK, None, {"*": Int8()}]):
        with (
            subtests.test(f"{wrapper} {wrapped}"),
            pytest.raises(
                TypeError, match=r"must be an object such as Int8\(\) or TopK\(0.01\), got"
            ),
        ):
            wrapper(wrapped)


def test_a_non_finite_buffer_is_rejected_naming_the_parameter(subtests):
    for dtype, bad in product([torch.float32, torch.bfloat16, torch.float16], [NAN, INF, -INF]):
        with subtests.test(f"{dtype} {bad}"):
            state = COMPRESSOR.init(layout_of(50), CPU, rank=2)
            COMPRESSOR.compress(gradient(0, 0, 50).to(dtype), state)
            before = residual_of(state)
            x = gradient(0, 1, 50).to(dtype)
            x[-1] = bad
            with pytest.raises(NonFiniteError, match=r"from rank 2 in fc\.bias"):
                COMPRESSOR.compress(x, state)
            x[0] = bad
            with pytest.raises(NonFiniteError, match=r"from rank 2 in fc\.weight"):
                COMPRESSOR.compress(x, state)
            assert torch.equal(residual_of(state), before)


def test_finite_buffers_pass_unchanged(subtests):
    for numel in [0, 1, 50]:
        with subtests.test(str(numel)):
            layout, x = layout_of(numel), 3e38 * torch.ones(numel)
            mine, theirs = COMPRESSOR, COMPRESSOR.compressor
            message = mine.compress(x, mine.init(layout, CPU))
            expected = theirs.compress(x, theirs.init(layout, CPU))
            assert all(torch.equal(a, b) for a, b in zip(message, expected, strict=True))
            assert torch.equal(
                mine.decompress(message, layout, torch.empty(numel)),
                theirs.decompress(message, layout, torch.empty(numel)),
            )


def test_properties_are_those_of_its_compressor():
    layout = layout_of(50)
    assert Finite(Int8(seed=0)).unbiased
    assert not Finite(Int8()).unbiased
    assert not Finite(Threshold(1.0)).fixed_length
    assert COMPRESSOR.feeds_back
    assert contraction(Finite(Cast()), layout) == contraction(Cast(), layout)
    assert Finite(Threshold(1.0)).validation_error(AttachPoint.GOSSIP)
    assert Finite(Cast()).validation_error(AttachPoint.GOSSIP) is None
    with pytest.raises(ValueError, match="must not have error feedback already"):
        ErrorFeedback(COMPRESSOR)
    assert eval(repr(COMPRESSOR)) == COMPRESSOR


def check_on_rank(rank):
    collectives, layout = Collectives(), layout_of(50)
    state = COMPRESSOR.init(layout, CPU, rank)
    COMPRESSOR.mean_(gradient(rank, 0, 50), state, collectives)
    before, payload = residual_of(state), collectives.stats.payload_bytes
    x = gradient(rank, 1, 50)
    if rank > 0:
        x[-rank] = NAN
    untouched = x.clone()
    with pytest.raises(NonFiniteError, match=r"nan or inf from rank 1 in fc\.bias"):
        COMPRESSOR.mean_(x, state, collectives)
    assert torch.equal(residual_of(state), before)
    assert torch.equal(x.nan_to_num(), untouched.nan_to_num())
    assert collectives.stats.payload_bytes == payload + 8


def test_means_over_ranks(ranks):
    ranks.run(3, check_on_rank)
