"""Compressed reduce-scatters and all-gathers of FSDP2, without FSDP2."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm import Run
from pyparallel.compression import (
    DGC,
    AttachPoint,
    Cast,
    Collectives,
    CorruptMessageError,
    ErrorFeedback,
    Int8,
    Piece,
    Sign,
    StateStore,
    Statistical,
    TopK,
)
from pyparallel.compression.hooks.fsdp_collectives import (
    compressed_all_gather,
    compressed_reduce_scatter,
)
from tests.compression.catalog import CATALOG
from tests.workers import assert_equal_on_all_ranks, call_each


@dataclass(frozen=True)
class Large(TopK):
    """A TopK of entries larger than 1: messages of variable length."""

    density: float = 1.0

    @property
    def fixed_length(self):
        return False

    def compress(self, x, state, residual=None):
        total = x.float() if residual is None else x + residual
        (indices,) = torch.where(total.abs() > 1)
        if residual is not None:
            residual.copy_(total.index_fill(0, indices, 0))
        return total[indices], indices.int()


def total(tensor, group=None):
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor


def residual_of(tensors):
    return sum(each.view(-1) for key, each in tensors.items() if key.endswith("residual"))


def residual_shard(store, collectives, numel):
    """Return the sum over ranks of this rank's shard of the residuals, (numel,)."""
    parts = store.state_dict()["parameters"]
    residual = torch.cat([residual_of(parts[name]) for name in sorted(parts)])
    return total(residual, collectives.group).view(collectives.size, -1)[collectives.rank, :numel]


def scatter(rank, group=None):
    """Check that the sums of all steps and the residuals add up to the truth."""
    for compressor, numel, dtype, bound in CASES:
        collectives = Collectives(Run(group))
        store = StateStore(compressor, collectives.rank, collectives.size)
        generator = torch.Generator().manual_seed(rank)
        missing = torch.zeros(numel)
        for _ in range(3):
            x = torch.randn(collectives.size * numel, generator=generator).to(dtype)
            given = x.clone()
            sums = total(x.float(), group).view(collectives.size, numel)
            missing += sums[collectives.rank]
            missing -= compressed_reduce_scatter(x, "layer", store, collectives)
            assert torch.equal(x, given), compressor
        if compressor.feeds_back:
            missing -= residual_shard(store, collectives, numel)
        assert numel == 0 or missing.abs().max() < bound, (compressor, numel, dtype)


SERVING = [
    each
    for row in CATALOG
    for each in row.compressors
    if each.error_at(AttachPoint.FSDP_GRADIENTS) is None
    if not isinstance(each, DGC)  # momentum sends inputs more than once
]
FED_BACK = [
    each for each in (*SERVING, ErrorFeedback(Large()), DGC(0.05, momentum=0.0)) if each.feeds_back
]
CASES = [
    *((each, 300, torch.float32, 1e-4) for each in FED_BACK),
    *((each, 1, torch.float32, 1e-4) for each in FED_BACK[::2]),
    *((each, 512, torch.bfloat16, 0.1) for each in FED_BACK[1::2]),
    (ErrorFeedback(Cast()), 7, torch.float16, 1e-4),
    (Int8(), 300, torch.float32, 0.3),
    (Int8(seed=1), 300, torch.float32, 0.5),
    (TopK(1.0), 300, torch.float32, 1e-5),
    (TopK(1.0), 0, torch.float32, 1e-5),
]


def gather(rank):
    """Check that all ranks receive the same bits, which are close to the truth."""
    for compressor, numel, dtype, bound in GATHERED:
        collectives = Collectives()
        store = StateStore(compressor, rank, collectives.size)
        out = torch.zeros(collectives.size, numel, dtype=dtype)
        out[rank] = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        truth = total(out.float())
        whole = out.view(-1)
        compressed_all_gather(out[rank], whole, "layer", store, collectives)  # from a view of it
        assert_equal_on_all_ranks(out.float().tolist())
        assert numel == 0 or (out - truth).abs().max() <= bound, (compressor, numel, dtype)


GATHERED = [
    *(
        (row.compressor, numel, torch.float32, math.inf)
        for row in CATALOG
        if row.compressor.error_at(AttachPoint.FSDP_PARAMETERS) is None
        for numel in (1, 300)
    ),
    (Int8(), 300, torch.float32, 0.02),
    (Int8(seed=1), 1, torch.bfloat16, 0.03),
    (TopK(1.0), 300, torch.float32, 0.0),
    (Large(), 300, torch.float32, 1.0),
    (Large(), 1, torch.float16, 1.0),
    (Cast(), 0, torch.float32, 0.0),
]


class Broken(Int8):
    """An Int8 whose messages on rank 1 have invalid scales."""

    def compress(self, x, state, residual=None):
        codes, scales = super().compress(x, state, residual)
        return codes, scales - 1e9 if state.rank == 1 else scales


def send_garbage(rank):
    collectives = Collectives()
    store = StateStore(Broken(), rank, collectives.size)
    x, out = torch.ones(30), torch.zeros(90)
    sentence = "got a corrupt one from rank 1"
    with pytest.raises(CorruptMessageError, match=sentence):
        compressed_reduce_scatter(x, "layer", store, collectives)
    with pytest.raises(CorruptMessageError, match=sentence):
        compressed_all_gather(x, out, "layer", store, collectives)


def follow_names(rank):
    """What is left of a head is not sent as another's, which has the same place."""
    body, *heads = (Piece(name, (50,)) for name in ("body", "a", "b"))
    for compressor in SENDING_ZEROS:
        collectives = Collectives()
        store = StateStore(compressor, rank, collectives.size)
        for step in range(2):
            x = torch.zeros(collectives.size, 100)
            if step % 2 == 0:
                x.normal_(generator=torch.Generator().manual_seed(10 * step + rank))
            pieces = body, heads[step % 2]
            got = compressed_reduce_scatter(x.view(-1), "", store, collectives, pieces)
            if step % 2:
                assert not got[50:].any(), compressor


SENDING_ZEROS = [  # for zeros
    each
    for each in FED_BACK[::2]
    if not isinstance(getattr(each, "compressor", each), Sign | Statistical)
]


def scatter_alone(rank):
    scatter(rank, dist.new_group([rank], use_local_synchronization=True))


def test_collectives(ranks):
    cases = scatter, scatter_alone, follow_names, gather, send_garbage
    ranks.run(3, call_each, [(case,) for case in cases])
