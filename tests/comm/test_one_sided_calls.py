"""A rank that loads a state while another trains: one sentence on both, which names both calls."""

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel import GossipDataParallel, SubnetTrainer
from pyparallel.compression import Int8, ddp_hook
from pyparallel.gossip import LocalSGD
from pyparallel.subnets import Partition


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def backward(module):
    module(torch.ones(2, 4)).sum().backward()


def gossip():
    module = nn.Linear(4, 4)
    optimizer = sgd(module.parameters())
    trainer = GossipDataParallel(module, optimizer, LocalSGD(1))
    states = trainer.algorithm_state_dict, trainer.load_algorithm_state_dict
    return lambda: (backward(trainer), optimizer.step()), *states


def subnets():
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    trainer = SubnetTrainer(layers, sgd, Partition(), interval=1)
    states = trainer.state_dict, trainer.load_state_dict
    return lambda: (backward(trainer), trainer.optimizer.step()), *states


def hook():
    replica = DistributedDataParallel(nn.Linear(4, 4))
    state, run = ddp_hook(Int8(), replica)
    replica.register_comm_hook(state, run)
    return lambda: backward(replica), state.state_dict, state.load_state_dict


def load_on_one(rank, make, loader):
    step, save, load = make()
    for _ in range(2):
        step()
    state = copy.deepcopy(save())
    if rank == loader:
        load(state)
    else:
        step()


def test_both_calls_are_named_on_both_ranks(ranks, subtests):
    names = {gossip: "an average after 3 steps", subnets: "optimizer.step()", hook: "backward()"}
    for make, name in names.items():
        for loader in range(2):
            calls = ["load_state_dict()", name][:: -1 if loader else 1]
            with subtests.test(make.__name__, loader=loader):
                outcomes = ranks.observe(2, load_on_one, make, loader, group_timeout=10)
                got = f"got {calls[0]} on rank 0 and {calls[1]} on rank 1"
                rule = "DisagreementError: all ranks must make the same call"
                expected = f"{rule}, {got}; nothing was loaded or averaged"
                assert [each.error for each in outcomes] == [expected] * 2
