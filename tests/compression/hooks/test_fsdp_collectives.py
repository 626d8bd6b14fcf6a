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
    StateStore,
    TopK,
)
from pyparallel.compression.hooks.fsdp_collectives import (
    compressed_all_gather,
    compressed_reduce_scatter,
)
from tests.compression.catalog import CATALOG
from tests.workers import run_ranks


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


def scatter(rank, cases, group=None):
    """Return by case the error of the sums of all steps plus residuals."""
    found = {}
    for case, (compressor, numel, dtype) in cases.items():
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
            assert torch.equal(x, given), case
        if compressor.feeds_back:
            missing -= residual_shard(store, collectives, numel)
        found[case] = float(missing.abs().max()) if numel else 0.0
    return found


SERVING = [
    each
    for row in CATALOG
    for each in row.compressors
    if each.validation_error(AttachPoint.FSDP_GRADIENTS) is None
    if not isinstance(each, DGC)  # momentum sends inputs more than once
]
FED_BACK = [
    each for each in (*SERVING, ErrorFeedback(Large()), DGC(0.05, momentum=0.0)) if each.feeds_back
]
CASES = {
    f"{compressor} {numel} {dtype}": ((compressor, numel, dtype), bound)
    for compressor, numel, dtype, bound in [
        *((each, numel, torch.float32, 1e-4) for each in FED_BACK for numel in (1, 300)),
        *((each, 512, torch.bfloat16, 0.1) for each in FED_BACK),
        (ErrorFeedback(Cast()), 7, torch.float16, 1e-4),
        (Int8(), 300, torch.float32, 0.3),
        (Int8(seed=1), 300, torch.float32, 0.5),
        (TopK(1.0), 300, torch.float32, 1e-5),
        (TopK(1.0), 0, torch.float32, 1e-5),
    ]
}


def gather_all(rank, cases):
    """Return by case what this rank has received, and its error."""
    found = {}
    for case, (compressor, numel, dtype, _) in cases.items():
        collectives = Collectives()
        store = StateStore(compressor, rank, collectives.size)
        out = torch.zeros(collectives.size, numel, dtype=dtype)
        out[rank] = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        truth = total(out.float())
        compressed_all_gather(
            out[rank], out.view(-1), "layer", store, collectives
        )  # from a view of the output
        found[case] = out.float().tolist(), float((out - truth).abs().amax()) if numel else 0.0
    return found


GATHERED = {
    f"{compressor} {numel} {dtype}": (compressor, numel, dtype, bound)
    for compressor, numel, dtype, bound in [
        *(
            (row.compressor, numel, torch.float32, math.inf)
            for row in CATALOG
            if row.compressor.validation_error(AttachPoint.FSDP_PARAMETERS) is None
            for numel in (1, 300)
        ),
        (Int8(), 300, torch.float32, 0.02),
        (Int8(seed=1), 1, torch.bfloat16, 0.03),
        (TopK(1.0), 300, torch.float32, 0.0),
        (Large(), 300, torch.float32, 1.0),
        (Large(), 1, torch.float16, 1.0),
        (Cast(), 0, torch.float32, 0.0),
    ]
}


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
    return True


def all_cases(rank):
    cases = {case: row for case, (row, _) in CASES.items()}
    alone = dist.new_group([rank], use_local_synchronization=True)
    return {
        "scattered": [scatter(rank, cases), scatter(rank, cases, alone)],
        "gathered": gather_all(rank, GATHERED),
        "refused": send_garbage(rank),
    }


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(3, all_cases)


def test_sums_and_residuals_add_up_to_the_truth(ranks):
    for together, alone in (rank["scattered"] for rank in ranks):
        for case, (_, bound) in CASES.items():
            assert together[case] < bound, case
            assert alone[case] < bound, f"{case} in a group of one"


def test_all_ranks_have_the_same_bits(ranks):
    for case, (*_, bound) in GATHERED.items():
        for got, error in [rank["gathered"][case] for rank in ranks]:
            assert error <= bound, case
            assert got == ranks[0]["gathered"][case][0], case


def test_a_corrupt_message_is_rejected_on_all_ranks_naming_its_sender(ranks):
    assert [rank["refused"] for rank in ranks] == [True] * 3
