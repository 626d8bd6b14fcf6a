"""A rank that dies ends all others with an error that names it, the step, and no living rank."""

import os
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pyparallel import GossipDataParallel
from pyparallel.compression import Cast, Int8, TopK, compress_fsdp, ddp_hook
from pyparallel.gossip import SGP, AllReduce
from pyparallel.gossip.topology import Ring
from pyparallel.subnets import Partition, SubnetTrainer
from tests.gossip.every_algorithm import EVERY_ALGORITHM
from tests.workers import observe_ranks, store_barrier

NUM_RANKS, VICTIM, STEP = 4, 2, 6


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8))


def loop(forward, optimizer, rank, num_steps=1000, record_loss=None):
    """Train; the victim dies in a step."""
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = forward(torch.ones(4, 40)).square().mean()
        if rank == VICTIM and step == STEP:
            os._exit(9)
        loss.backward()
        if record_loss:
            record_loss(loss)
        optimizer.step()


def wrap(algorithm):
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return GossipDataParallel(module, optimizer, algorithm), optimizer


def gossip(rank, name):
    trainer, optimizer = wrap(EVERY_ALGORITHM[name](NUM_RANKS))
    loop(trainer, optimizer, rank, record_loss=trainer.record_loss)
    trainer.flush()


def unused(rank, name):
    trainer, optimizer = wrap(AllReduce(find_unused_parameters=True))
    loop(trainer, optimizer, rank)


def subnets(rank, interval):
    trainer = SubnetTrainer(
        model(), lambda p: torch.optim.SGD(p, lr=0.01), Partition(), interval=interval
    )
    loop(trainer, trainer.optimizer, rank)


def ddp(rank, compressor):
    replica = DistributedDataParallel(model())
    replica.register_comm_hook(*ddp_hook(compressor, replica))
    loop(replica, torch.optim.SGD(replica.parameters(), lr=0.01), rank)


def ddp_unused(rank, compressor):
    replica = DistributedDataParallel(model(), find_unused_parameters=True)
    replica.register_comm_hook(*ddp_hook(compressor, replica))
    loop(replica, torch.optim.SGD(replica.parameters(), lr=0.01), rank)


def fsdp(rank, compressors):
    module = model()
    for part in (module[0], module):
        fully_shard(part)
    compress_fsdp(module, **compressors)
    loop(module, torch.optim.SGD(module.parameters(), lr=0.01), rank)


def call(rank, name):
    """The victim dies before a call of all ranks."""
    trainer, optimizer = None, None
    if name != "construction":
        trainer, optimizer = wrap(SGP(Ring(NUM_RANKS)))
        for _ in range(3):
            trainer(torch.ones(4, 40)).sum().backward()
            optimizer.step()
    store_barrier(name)
    if rank == VICTIM:
        os._exit(9)
    if name == "construction":
        wrap(SGP(Ring(NUM_RANKS)))
    if name == "consensus":
        trainer.consensus().__enter__()
    if name == "distance":
        trainer.consensus_distance()
    if name == "flush":
        trainer.flush()
    if name == "state":
        trainer.algorithm_state_dict()
    if name == "load":
        trainer.load_algorithm_state_dict({})


def join(rank, name):
    """Ranks have unequal numbers of batches; the victim dies when others have none left."""
    trainer, optimizer = wrap(EVERY_ALGORITHM[name](NUM_RANKS))
    with trainer.join():
        loop(trainer, optimizer, rank, num_steps=[3, 1000, 1000, 1000][rank])


CASES = {
    **{name: (gossip, name) for name in EVERY_ALGORITHM},
    "allreduce, unused": (unused, None),
    **{f"join, {name}": (join, name) for name in ("sgp", "localsgd", "allreduce", "adpsgd")},
    **{
        name: (call, name)
        for name in ("construction", "consensus", "distance", "flush", "state", "load")
    },
    "subnets": (subnets, 1),
    "subnets 4": (subnets, 4),
    "ddp int8": (ddp, Int8()),
    "ddp cast": (ddp, Cast(torch.bfloat16)),
    "ddp cast, wide": (ddp, Cast(torch.bfloat16, accumulate=torch.bfloat16)),
    "ddp top-k": (ddp, TopK(0.1)),
    "ddp cast, unused": (ddp_unused, Cast(torch.bfloat16)),
    "fsdp": (fsdp, {"gradients": Int8(), "parameters": Int8()}),
    "fsdp gradients": (fsdp, {"gradients": Int8()}),
    "fsdp parameters": (fsdp, {"parameters": Int8()}),
}


# The others are slow: they come to the same calls.
FAST = {
    "hierarchical",
    "adpsgd",
    "join, allreduce",
    "distance",
    "ddp cast, unused",
    "fsdp gradients",
}


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_the_error_names_the_dead_rank_and_the_step(name):
    outcomes = observe_ranks(NUM_RANKS, *CASES[name], group_timeout=6, time_limit=40)
    assert outcomes[VICTIM].exit_code == 9
    errors = {rank: outcomes[rank].error for rank in range(NUM_RANKS) if rank != VICTIM}
    for rank, error in errors.items():
        is_in_step = name not in ("construction", "load")
        place = rf"rank {rank}, step \d+" if is_in_step else f"rank {rank}"
        assert re.match(rf"PeerError: {place}: .*: rank {VICTIM} died, or ", error), errors
        assert set(re.findall(r"rank (\d)", error)) == {str(rank), str(VICTIM)}, errors
