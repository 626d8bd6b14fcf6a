"""The check for gradients with a nan or an inf, on the CPU and as on a GPU."""

from functools import partial
from itertools import product

import pytest
import torch

from pyparallel.compression import (
    Cast,
    Chain,
    Collectives,
    ErrorFeedback,
    Int4,
    Int8,
    NonFiniteError,
    Sign,
    Ternary,
    TopK,
)
from pyparallel.compression.layout import BufferLayout
from pyparallel.compression.nonfinite import NonFiniteCheck
from pyparallel.planning.simulate import SingleRankCollectives
from pyparallel.training.nonfinite import first_nonfinite
from tests.compression.local_collectives import run_locally

NAN, INF = float("nan"), float("inf")
PARAMETERS = {"a": torch.empty(2, 3), "empty": torch.empty(0), "b": torch.ones(4)}
LAYOUT = BufferLayout.of(PARAMETERS.items())


def test_the_first_part_that_is_not_finite_is_found(subtests):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with subtests.test(str(dtype)):
            largest = torch.full((10,), torch.finfo(dtype).max, dtype=dtype)
            assert first_nonfinite(LAYOUT.split(largest)) == -1
            for bad in (NAN, INF, -INF):
                for place, piece in ((5, 0), (6, 2)):
                    x = torch.zeros(10, dtype=dtype)
                    x[place] = bad
                    assert first_nonfinite(LAYOUT.split(x)) == piece
            x[:2] = torch.tensor([INF, -INF])
            assert first_nonfinite(LAYOUT.split(x)) == 0


def test_a_gpus_buffer_counts_as_zeros_and_all_ranks_raise_in_the_next_step():
    """What runs on a GPU, on tensors of the CPU."""
    check, collectives = NonFiniteCheck("raise"), Collectives()
    for step, bad in enumerate((1.0, NAN)):
        for _ in range(2):  # buffers of a step
            x = torch.ones(10)
            x[3] *= bad
            check._apply_on_device_(x, LAYOUT, collectives, step)
            assert x.sum() == (0 if step else 10)
    with pytest.raises(NonFiniteError, match=r"rank 0 in one of a to b in step 1"):
        check._apply_on_device_(torch.ones(10), LAYOUT, collectives, 2)
    check._apply_on_device_(torch.ones(10), LAYOUT, collectives, 3)  # once for a step


DROPPING = [
    *(TopK(0.05), Int8(seed=1), Sign(block_size=64)),
    *map(ErrorFeedback, (TopK(0.05), Int8(), Int4(block_size=32), Sign(), Ternary(block_size=64))),
]


def steps_of_finite(compressor, numel, dtype, bad, collectives):
    """Take a step in which all is finite and, twice, one in which rank 1's buffer has ``bad``.

    Return what shows it, which ``mean_`` and a buffer of zeros in its place must give.
    """
    found = []
    for first in (0, 1):  # the bad buffer comes before or after one that leaves a residual
        state = compressor.init(BufferLayout.flat(numel), torch.device("cpu"), collectives.rank)
        for step in range(2):
            is_bad = step == first and collectives.rank == 1
            x = torch.randn(numel, generator=torch.Generator().manual_seed(step)).to(dtype)
            x *= collectives.rank + 1
            if is_bad and bad is None:
                x.zero_()
            elif is_bad:
                x[numel // 2] = bad
            residuals = list(state.entries.values())
            if bad is None:
                compressor.mean_(x, state, collectives)
            else:
                of_ranks = compressor.mean_(x, state, collectives, drops=True)
                assert of_ranks.tolist() == [rank == 1 and step == first for rank in range(4)]
                if is_bad and compressor == ErrorFeedback(TopK(0.05)):
                    assert not residuals[0].any()  # what it held went with the message
            assert all(each.isfinite().all() for each in (x, *residuals))
            if step == 0:
                found += [each.clone() for each in (x, *residuals)]
    return found


def test_a_buffer_that_its_encoder_finds_counts_as_zeros(subtests):
    buffers = (5, torch.float32, NAN), (1037, torch.float32, INF), (1000, torch.bfloat16, -INF)
    assert not any(each.finds_nonfinite for each in (Cast(), Chain(TopK(0.3), Int8())))
    for compressor, (numel, dtype, bad) in product(DROPPING, buffers):
        assert compressor.finds_nonfinite
        with subtests.test(f"{compressor} {numel} {bad}"):
            run = partial(steps_of_finite, compressor, numel, dtype)
            found, expected = (run_locally(4, partial(run, each)) for each in (bad, None))
            for got, wanted in zip(found, expected, strict=True):
                assert all(map(torch.equal, got, wanted))


def test_the_host_waits_for_nothing(subtests):
    x = torch.empty(10, device="meta")  # to read a value would raise
    for policy in ("skip", "allow"):
        with subtests.test(policy):
            NonFiniteCheck(policy).apply_(x, LAYOUT, SingleRankCollectives(3), 0)
