"""Two ranks over NCCL train as over gloo on the CPU, on two GPUs or on one that they share.

NCCL from 2.30 on lets ranks share a GPU: ``make gpu`` says how.
"""

import copy
import functools
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.gossip import SGP, GossipDataParallel
from pyparallel.gossip.topology import Ring
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


def gossip(rank, make, device, group):
    """Return the parameters after some steps on a rank's own data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = GossipDataParallel(model, optimizer, make(2), process_group=group)
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        inputs, target = (torch.randn(5, n, generator=generator).to(device) for n in (6, 3))
        optimizer.zero_grad()
        nn.functional.mse_loss(trainer(inputs), target).backward()
        optimizer.step()
    trainer.flush()
    return [parameter.detach().cpu() for parameter in model.parameters()]


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


def compare_hooks(rank):
    def run(compressor, device, group):
        return averaged(compressor, rank, torch.device(device), 3, group)

    return compare(
        {str(each): lambda device, group, each=each: run(each, device, group) for each in FIXED}
    )


def compare_pipelines(rank):
    def run(schedule, options, device, group):
        found = losses_of_ranks(device, copy.deepcopy(schedule), process_group=group, **options)
        return [loss for loss in found if loss is not None]

    return compare(
        {
            name: lambda device, group, case=case: run(*case, device, group)
            for name, case in CASES.items()
            if name != "Interlocking"
        }
    )


@pytest.mark.parametrize("function", [compare_gossip, compare_hooks, compare_pipelines])
def test_two_ranks_over_nccl_train_as_over_gloo(ranks, function):
    for problems in ranks.run(2, function, time_limit=60):
        assert not problems, "\n".join(problems)
