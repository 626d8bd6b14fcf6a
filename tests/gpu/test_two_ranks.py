"""Ranks over NCCL train as over gloo on the CPU, on a GPU each or on one that they share.

NCCL from 2.30 on lets ranks share a GPU: ``make gpu`` says how.
"""

import copy
import functools
import math
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from pyparallel.compression import Int8
from pyparallel.gossip import SGP, DiLoCo, GossipDataParallel, LocalSGD
from pyparallel.gossip.topology import Ring
from pyparallel.sequence import ring_attention
from tests.gossip.every_algorithm import EVERY_ALGORITHM
from tests.gpu.test_training import FIXED, averaged
from tests.pipeline.gpu.test_on_gpu import CASES, losses_of_ranks

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < (1 if "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ else 2),
    reason="needs two GPUs, or one that ranks may share",
)
STEPS = 6
NODES_OF_TWO = ("leadersgd", "hierarchical")  # of which two ranks are one
# Whose results depend on when messages arrive.
WITHOUT_ORDER = {"adpsgd"}


def nccl_group(rank):
    """Return the group of all ranks over NCCL; this rank uses its own GPU, or the only one."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # of ranks that share a GPU
    return dist.new_group(backend="nccl")


def gossip(rank, make, device, group, mesh=None):
    """Return the parameters after some steps on a rank's own data; ``mesh`` shards the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).to(device)
    where = {"process_group": group}
    if mesh is not None:
        fully_shard(model, mesh=mesh["shard"])
        where = {"mesh": mesh["replicate"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = GossipDataParallel(model, optimizer, make(2), **where)
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        inputs, target = (torch.randn(5, n, generator=generator).to(device) for n in (6, 3))
        optimizer.zero_grad()
        nn.functional.mse_loss(trainer(inputs), target).backward()
        optimizer.step()
    trainer.flush()
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [(each if mesh is None else each.to_local()).cpu() for each in parameters]


def attention(rank, causal, compressor, device, group):
    """Return this rank's part of ring attention, and its gradients."""
    generator = torch.Generator().manual_seed(1 + rank)
    parts = (torch.randn(2, 3, 64, 16, generator=generator) for _ in range(4))
    q, k, v, of_out = (part.to(device).requires_grad_() for part in parts)
    out = ring_attention(q, k, v, causal=causal, compressor=compressor, group=group)
    return [each.detach().cpu() for each in (out, *torch.autograd.grad(out, (q, k, v), of_out))]


def compare(runs):
    """Return problems of named functions of a device and a process group."""
    group, problems = nccl_group(dist.get_rank()), []
    for name, run in runs.items():
        sys.stderr.write(f"{name}\n")  # the last one of a rank that hangs
        own, wanted = run("cuda", group), run("cpu", None)
        try:
            torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-4)
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    return problems


def compare_gossip(rank):
    def run(make, device, group):
        return gossip(rank, make, device, group)

    def through_symmetric_memory(device, group):
        transport = "symmetric_memory" if device == "cuda" else "process_group"
        return run(lambda n: SGP(Ring(n), overlap=1, transport=transport), device, group)

    runs = {
        name: functools.partial(run, make)
        for name, make in EVERY_ALGORITHM.items()
        if name not in WITHOUT_ORDER and not name.startswith(NODES_OF_TWO)
    }
    return compare(runs | {"sgp through symmetric memory": through_symmetric_memory})


def compare_sharded(rank):
    """Compare replicas that are sharded over two ranks each."""
    layout, names = torch.arange(4).view(2, 2), ("replicate", "shard")
    lines = [[dist.new_group(line.tolist(), backend="nccl") for line in each]
             for each in (layout.T, layout)]  # fmt: skip
    groups = [lines[0][rank % 2], lines[1][rank // 2]]

    def run(make, device, group):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if device == "cuda":
            mesh = DeviceMesh.from_group(groups, "cuda", layout, mesh_dim_names=names)
        return gossip(rank, make, device, group, mesh)

    algorithms = {
        "SGP": lambda n: SGP(Ring(n), overlap=1),
        "SGP of int8": lambda n: SGP(Ring(n), compressor=Int8()),
        "LocalSGD": lambda n: LocalSGD(interval=2),
        "DiLoCo": lambda n: DiLoCo(interval=2),
    }
    return compare({name: functools.partial(run, make) for name, make in algorithms.items()})


def compare_attention(rank):
    return compare(
        {
            f"{causal}, {compressor}": functools.partial(attention, rank, causal, compressor)
            for causal in (False, True, "zigzag")
            for compressor in (None, Int8())
        }
    )


def compare_hooks(rank):
    def run(compressor, device, group):
        return averaged(compressor, rank, torch.device(device), 3, group)

    return compare(
        {str(each): lambda device, group, each=each: run(each, device, group) for each in FIXED}
    )


def compare_pipelines(rank):
    def run(schedule, options, device, group):
        found = losses_of_ranks(device, copy.deepcopy(schedule), process_group=group, **options)
        return [loss for loss in found if not math.isnan(loss)]  # which is not known yet

    return compare(
        {
            name: lambda device, group, case=case: run(*case, device, group)
            for name, case in CASES.items()
            if name != "Interlocking"
        }
    )


FUNCTIONS = [compare_gossip, compare_hooks, compare_pipelines, compare_attention, compare_sharded]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_ranks_over_nccl_train_as_over_gloo(ranks, function):
    num_ranks = 4 if function is compare_sharded else 2
    for problems in ranks.run(num_ranks, function, time_limit=150):
        assert not problems, "\n".join(problems)
