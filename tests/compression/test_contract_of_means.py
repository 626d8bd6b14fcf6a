"""The contract of every compressor's means over ranks: one row each in ``catalog.py``."""

from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm import Run
from pyparallel.compression import (
    BufferLayout,
    Cast,
    Chain,
    Collectives,
    CorruptMessageError,
    ErrorFeedback,
    Int8,
    PermK,
    PerParameter,
    RandomK,
    Switch,
    Threshold,
    TopK,
)
from pyparallel.compression.quantizers.blockwise import BlockwiseCompressor
from tests.cases import slow
from tests.compression.catalog import CATALOG, LAYOUT
from tests.compression.means import CPU, layout_of, residual_of

BUFFERS = [
    (0, torch.float32),
    (5, torch.float32),
    (1037, torch.float32),
    (1000, torch.bfloat16),
]
LONG = BufferLayout.flat(3000)  # has a part for every rank with any block size


def draw(collectives, step=0, numel=LAYOUT.numel, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + collectives.rank)
    return torch.randn(numel, generator=generator).to(dtype)


def start(compressor, collectives, layout=LAYOUT):
    return compressor.init(layout, CPU, collectives.rank)


def dense_mean(x, collectives):
    total = x.double()
    dist.all_reduce(total, group=collectives.group)
    return total / collectives.size


def is_on_all(verdict, collectives):
    """Gather a condition: all ranks fail together, or else one would leave the others waiting."""
    return bool(collectives.all_gather(torch.tensor([verdict])).all())


def check_bits_and_residuals(compressor, collectives, adds_up=True):
    """All ranks get the same bits; means and residuals add up to the true means."""
    for numel, dtype in BUFFERS:
        state = start(compressor, collectives, layout_of(numel))
        truth, got = torch.zeros(2, numel, dtype=torch.float64)
        for step in range(4):
            x = draw(collectives, step, numel, dtype)
            truth += x
            compressor.mean_(x, state, collectives)
            got += x
            everywhere = collectives.all_gather(x)
            bits = everywhere.view(torch.uint8)
            assert (bits == bits[0]).all(), (numel, dtype, step)
            assert everywhere.isfinite().all(), (numel, dtype, step)
        if adds_up:
            left = dense_mean(truth - residual_of(state), collectives)
            allowed = 1e-5 if dtype == torch.float32 else 2**-8
            assert (left - got).norm() <= allowed * truth.norm(), (numel, dtype)


def check_row(row, collectives):
    check_bits_and_residuals(row.compressors[-1], collectives, adds_up=row.feeds_back)


def check_full_rate_is_the_dense_mean(row, collectives):
    if row.full_rate is None:
        return
    for numel in (1, 5, LAYOUT.numel):
        layout = LAYOUT if numel == LAYOUT.numel else BufferLayout.flat(numel)
        x = draw(collectives, numel=numel)
        truth, largest = dense_mean(x, collectives), collectives.all_gather(x).abs().max()
        row.full_rate.mean_(x, start(row.full_rate, collectives, layout), collectives)
        assert (x - truth).abs().max() <= row.tolerance * largest, numel


def check_nan_propagates_to_all_ranks_and_is_not_kept(row, collectives):
    compressor = row.compressors[-1]
    state = start(compressor, collectives)
    x = draw(collectives)
    if collectives.rank == 1:
        x[300] = torch.nan
    compressor.mean_(x, state, collectives)
    assert not row.shows_all or x[300].isnan()
    x = draw(collectives)
    compressor.mean_(x, state, collectives)
    residual = state.entries.get("residual", torch.zeros(1))
    assert is_on_all(bool(residual.isfinite().all() and x.isfinite().all()), collectives)


class Spoiler:
    """A ``compress`` whose n-th message consists of bytes 0x80, as no real one does."""

    def __init__(self, compressor, which):
        self.compressor, self.compress = compressor, type(compressor).compress
        self.until = which

    def __call__(self, *arguments):
        message = self.compress(self.compressor, *arguments)
        self.until -= 1
        if self.until == 0:
            for tensor in message:
                tensor.view(torch.uint8).fill_(0x80)
        return message


def refusal(compressor, collectives, which):
    """Return the error of a mean with a corrupt message of rank 1."""
    x = draw(collectives, numel=LONG.numel)
    state = start(compressor, collectives, LONG)
    spoiler = Spoiler(compressor, which if collectives.rank == 1 else 0)
    with mock.patch.object(type(compressor), "compress", spoiler):
        try:
            compressor.mean_(x, state, collectives)
        except CorruptMessageError as error:
            return str(error)
    return ""


def check_all_ranks_reject_a_corrupt_message(row, collectives):
    if not (row.refuses and row.names_sender):
        return
    for which in [1, 2] if isinstance(row.compressor, BlockwiseCompressor) else [1]:
        sentence = refusal(row.compressor, collectives, which)
        assert is_on_all("got a corrupt one from rank 1" in sentence, collectives), (
            which,
            sentence,
        )


CHECKS = [
    check_row,
    check_all_ranks_reject_a_corrupt_message,
    check_full_rate_is_the_dense_mean,
    check_nan_propagates_to_all_ranks_and_is_not_kept,
]
# Other options, and compressors within others, which feed back by themselves.
BIASES, RARELY = PerParameter({"*.bias": RandomK(0.3), "*": TopK(0.1)}), ErrorFeedback(TopK(0.1))
FEEDING_BACK = [
    *map(ErrorFeedback, (PermK(), PermK(7, run_length=1), Threshold(3.0), BIASES)),
    *map(ErrorFeedback, (Chain(Threshold(1.5), Int8(block_size=32)), Chain(PermK(), Cast()))),
    PerParameter({"*.bias": ErrorFeedback(PermK()), "*": ErrorFeedback(Int8())}),
    PerParameter({"nothing": ErrorFeedback(PermK()), "*": ErrorFeedback(TopK(0.2))}),
    Switch({0: ErrorFeedback(Cast()), 2: RARELY}),
    Switch({0: ErrorFeedback(RandomK(0.1)), 2: ErrorFeedback(PermK(num_ranks=3))}),
    Switch({0: PerParameter({"*.bias": RARELY, "*": ErrorFeedback(Int8())}), 2: RARELY}),
    PerParameter(
        {
            "*.bias": Switch({0: ErrorFeedback(Cast()), 3: ErrorFeedback(RandomK(0.5))}),
            "*": Switch({0: RARELY, 2: ErrorFeedback(Int8())}),
        }
    ),
]


def find_failures(collectives, checks):
    failures = []
    for check, case in checks:
        try:
            check(case, collectives)
        except AssertionError as error:
            failures.append(f"{case} {check.__name__}: {error}")
    return failures


def average(rank, every):
    """Run all checks on all ranks, and then those of some sums on two of three."""
    pair = dist.new_group([0, 2])
    sums = [(check_row, row) for row in CATALOG]
    sums += [(check_bits_and_residuals, each) for each in FEEDING_BACK]
    failures = find_failures(Collectives(), [*product(CHECKS[1:], CATALOG), *sums])
    if rank != 1:
        full_rate = product([check_full_rate_is_the_dense_mean], CATALOG)
        failures += find_failures(Collectives(Run(pair)), [*full_rate, *sums[::every]])
    return failures


@pytest.mark.parametrize("every", [12, slow(1)])
def test_means(ranks, every):
    assert ranks.run(3, average, every, time_limit=120) == [[], [], []]
