"""Means make no GPU's host wait: on the meta device, reading a value raises."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from pyparallel.compression import Cast, ErrorFeedback, PowerSGD, Switch, Threshold, compress_ddp
from pyparallel.compression.hooks.fsdp_collectives import (
    compressed_all_gather,
    compressed_reduce_scatter,
)
from pyparallel.compression.state_store import StateStore
from pyparallel.planning.simulate import SingleRankCollectives
from tests.compression.catalog import CATALOG, LAYOUT
from tests.workers import on_ranks

META = torch.device("meta")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class RefuseWaitingCopies(TorchDispatchMode):
    """Raises for copies from the host's memory for which a GPU's host would wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in COPIES:
            source = args[COPIES.index(func)]
            waits = not ((kwargs or {}).get("non_blocking") or args[2:])
            assert source.device == out.device or not waits, f"{func} from {source.device}"
        return out


def bare(compressor):
    return compressor.compressor if isinstance(compressor, ErrorFeedback) else compressor


def compressors(rows):
    """Return the compressors of some rows, and two, but not those that wait."""
    found = [each for row in rows for each in row]
    found += [Cast(accumulate=torch.bfloat16), ErrorFeedback(Cast(torch.float16))]
    return [each for each in found if not isinstance(bare(each), Threshold)]


EVERY = compressors(row.compressors for row in CATALOG)
FED_BACK = compressors(row.compressors[-1:] for row in CATALOG)  # which runs more


def average(compressor, state, collectives, dtype=torch.float32):
    x = torch.empty(LAYOUT.numel, dtype=dtype, device=META)
    compressor.mean_(x, state, collectives)


def test_no_mean_waits_for_a_value_or_a_copy(subtests):
    for compressor in FED_BACK:
        state = compressor.init(LAYOUT, META)
        steps = 3 if isinstance(bare(compressor), Switch) else 2
        with subtests.test(str(compressor)), RefuseWaitingCopies():
            for dtype in (torch.float32, torch.bfloat16, torch.float32)[:steps]:
                average(compressor, state, SingleRankCollectives(3), dtype)


def test_those_that_wait_are_found():
    compressor = Threshold(0.5)
    with pytest.raises((RuntimeError, NotImplementedError)):
        average(compressor, compressor.init(LAYOUT, META), SingleRankCollectives(3))
    with pytest.raises(AssertionError, match="from cpu"), RefuseWaitingCopies():
        torch.arange(3).to(META)


def test_no_collective_of_fsdp_waits(subtests):
    x = torch.empty(300, device=META)
    for compressor in EVERY:
        if not compressor.fixed_length or "PermK" in repr(compressor):
            continue
        if isinstance(bare(compressor), PowerSGD) or "PerParameter" in repr(compressor):
            continue  # refused there
        with subtests.test(str(compressor)), RefuseWaitingCopies():
            collectives = SingleRankCollectives(3)
            compressed_reduce_scatter(x, "w", StateStore(compressor, 0, 3), collectives)
            if not compressor.feeds_back:
                out = torch.empty(900, device=META)
                compressed_all_gather(x, out, "w", StateStore(compressor, 0, 3), collectives)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@on_ranks(1)
def test_no_hook_waits_on_a_gpu(rank):
    device = torch.device("cuda", 0)
    group = dist.new_group([0], backend="nccl")
    for compressor in EVERY:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
        compress_ddp(ddp, compressor)
        batch = torch.randn(8, 64, device=device)
        for step in range(5):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            try:
                ddp(batch).square().mean().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert all(each.grad.isfinite().all() for each in model.parameters())
