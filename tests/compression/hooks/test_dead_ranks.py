"""A rank that dies in a step ends the others with an error that names rank and step."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pyparallel.compression import Int8, compress_fsdp, ddp_hook
from tests.workers import observe_ranks


def with_ddp_hook(module):
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(*ddp_hook(Int8(), ddp))
    return ddp


def with_compressed_fsdp(module):
    compress_fsdp(fully_shard(module), gradients=Int8(), parameters=Int8())
    return module


def die_in_step_2(rank, wrap):
    torch.manual_seed(0)
    model = wrap(nn.Linear(40, 30))
    for step in range(4):
        if rank == 1 and step == 2:
            os._exit(3)
        model(torch.ones(2, 40)).sum().backward()


@pytest.mark.parametrize("wrap", [with_ddp_hook, with_compressed_fsdp])
def test_the_error_names_rank_and_step(wrap):
    survivor, dead = observe_ranks(2, die_in_step_2, wrap, group_timeout=5)
    assert dead.exit_code == 3
    assert "rank 0, step 2: the all-" in survivor.error, survivor.error
    assert "rank 1 died, or ended without this call (" in survivor.error
