"""The contract of every compressor's means over ranks: one row each in ``catalog.py``."""

from unittest import mock

import torch
import torch.distributed as dist

from pyparallel.comm import Run
from pyparallel.compression import BufferLayout, Collectives, CorruptMessageError, ErrorFeedback
from pyparallel.compression.quantizers.blockwise import BlockwiseCompressor
from tests.compression.catalog import CATALOG, LAYOUT
from tests.workers import run_ranks

CPU = torch.device("cpu")
BUFFERS = [(0, torch.float32), (1, torch.float32), (5, torch.float32), (1000, torch.bfloat16)]
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


def check_ranks_get_the_same_bits(row, collectives):
    for numel, dtype in BUFFERS:
        x = draw(collectives, numel=numel, dtype=dtype)
        row.compressor.mean_(
            x, start(row.compressor, collectives, BufferLayout.flat(numel)), collectives
        )
        everywhere = collectives.all_gather(x)
        bits = everywhere.view(torch.uint8)
        assert (bits == bits[0]).all(), (numel, dtype)
        assert everywhere.isfinite().all(), (numel, dtype)


def check_means_and_residuals_add_up(row, collectives):
    if not row.feeds_back:
        return
    compressor = ErrorFeedback(row.compressor)
    for dtype, allowed in [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)]:
        state = start(compressor, collectives)
        truth, got = torch.zeros(2, LAYOUT.numel, dtype=torch.float64)
        for step in range(4):
            x = draw(collectives, step, dtype=dtype)
            truth += x
            compressor.mean_(x, state, collectives)
            got += x
        left = dense_mean(truth - state.entries["residual"], collectives)
        assert (left - got).norm() <= allowed * truth.norm(), dtype


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
    check_ranks_get_the_same_bits,
    check_all_ranks_reject_a_corrupt_message,
    check_means_and_residuals_add_up,
    check_full_rate_is_the_dense_mean,
    check_nan_propagates_to_all_ranks_and_is_not_kept,
]


def find_failures(collectives, rows, checks):
    failures = []
    for row in rows:
        for check in checks:
            try:
                check(row, collectives)
            except AssertionError as error:
                failures.append(f"{row} {check.__name__}: {error}")
    return failures


def average(rank, rows):
    """Run all checks on all ranks, and then those of a group's sums on two of three."""
    pair = dist.new_group([0, 2])
    failures = find_failures(Collectives(), rows, CHECKS)
    if rank != 1:
        failures += find_failures(Collectives(Run(pair)), rows, CHECKS[:3])
    return failures


def test_means():
    assert run_ranks(3, average, CATALOG) == [[], [], []]
