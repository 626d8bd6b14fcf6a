"""A probe: ranks that share a GPU read each other's memory, without NCCL (symmetric memory)."""

import os

import pytest
import torch
import torch.distributed as dist

from pyparallel.ops import mix_

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def average_with_the_neighbor(rank):
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    from torch.distributed import _symmetric_memory as symmetric

    torch.cuda.set_device(0)
    z = symmetric.empty(2**20, dtype=torch.float32, device="cuda").fill_(float(rank))
    handle = symmetric.rendezvous(z, dist.group.WORLD)
    torch.cuda.synchronize()
    dist.barrier()
    neighbor = handle.get_buffer(1 - rank, z.shape, z.dtype)
    own, one = z.clone(), torch.ones((), dtype=torch.float64, device="cuda")
    mix_(own, one, [neighbor], torch.ones(1, dtype=torch.float64, device="cuda"))
    torch.cuda.synchronize()
    dist.barrier()
    return bool((own == 0.5).all())


def test_a_kernel_mixes_what_lies_in_another_processs_memory(ranks):
    assert ranks.run(2, average_with_the_neighbor, time_limit=40) == [True, True]
