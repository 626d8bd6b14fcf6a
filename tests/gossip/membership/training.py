"""Trainers of members in the processes of a test, and what they hold."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.compression import TopK
from pyparallel.gossip import DPSGD, SGP
from pyparallel.gossip.membership import push_sum_members
from pyparallel.gossip.membership.averager import ElasticAverager
from pyparallel.gossip.membership.decision import name_of
from pyparallel.gossip.membership.ledger import Account
from pyparallel.gossip.membership.members import gather_from_members
from pyparallel.gossip.topology import OnePeerExponential
from tests.gossip.membership.service import Served, serve


class Death(BaseException):
    """What a rank raises in place of being killed."""


exponential = SGP(OnePeerExponential)
overlapping = SGP(OnePeerExponential, overlap=1)
delayed = SGP(OnePeerExponential, overlap=2)
compressing = SGP(OnePeerExponential, compressor=TopK(0.3))
symmetric = DPSGD()


def make(address, rank, algorithm, *, width=6, optimizer=torch.optim.SGD, trained=None, **options):
    """Return the module, its optimizer, the trainer and the membership.

    ``trained``: what the trainable parameters begin with.
    """
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(width, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    module[2].bias.requires_grad_(False)
    for p in module.parameters() if trained is not None else ():
        if p.requires_grad:
            nn.init.constant_(p, trained)
    stepped = optimizer([p for p in module.parameters() if p.requires_grad], lr=0.0)
    membership = Served(address, f"r{rank}", **options)
    trainer = GossipDataParallel(
        module, stepped, algorithm, membership=membership, bucket_cap_mb=1e-4
    )
    return module, stepped, trainer, membership


def step(module, optimizer, trainer, scale=1.0):
    optimizer.zero_grad()
    (scale * trainer(torch.ones(4, module[0].in_features)).square().mean()).backward()
    optimizer.step()


def step_on(*arguments):
    while True:
        step(*arguments)


def averager_of(trainer) -> ElasticAverager:
    return trainer._averager


def held(trainer):
    """Return this rank's weight and numerator, in units that do not change, without messages."""
    account = averager_of(trainer).inner.account
    weight = account.weight * 2.0**-account.exponent
    z = torch.cat([buffer.double() for buffer in trainer._buckets.buffers])
    return weight, weight * z


accounts = {}  # of the last change, by name


def gather_and_keep(*arguments):
    found = gather_from_members(*arguments)
    accounts.clear()
    accounts.update({name_of(key): Account(**each) for key, each in found.items()})
    return found


def on_service(rank, function, *arguments):
    """Run a function without the pool's own group, with the address of a service."""
    store, size = dist.group.WORLD.get_group_store(), dist.get_world_size()
    if rank == 0:
        host, port = serve()
        store.set("service", f"{host} {port}")
    host, port = store.get("service").decode().split()
    dist.destroy_process_group()
    try:
        with mock.patch.object(push_sum_members, "gather_from_members", gather_and_keep):
            return function((host, int(port)), store, rank, size, *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.PrefixStore("after", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def die_at(moment, trainer):
    """Have the trainer's next round raise Death at a moment of it."""
    rounds = averager_of(trainer).inner.current
    original = rounds._exchange_receipts

    def die(*_):
        raise Death

    def die_after(*arguments):
        original(*arguments)
        die()

    if moment == "before the round":
        rounds.send = die
    elif moment == "after sending":
        for buffer in rounds._round_buffers:
            buffer.wait = die
    else:
        rounds._exchange_receipts = die if moment == "after merging" else die_after


def die(trainer, membership):
    """End as a killed process does: its connections are closed, and it is alive no more."""
    membership.die()
    averager_of(trainer)._epochs._is_closed = True
    averager_of(trainer)._end_group()


def flat_of(trainer):
    return torch.cat([each.detach().double().flatten() for each in trainer._buckets.parameters])
