"""A rank that loads a state while another trains: one sentence on both, which names both calls."""

import copy

from pyparallel.gossip import LocalSGD
from tests.comm import trainers


def gossip():
    trainer, step = trainers.gossip(LocalSGD(1))
    return step, trainer.algorithm_state_dict, trainer.load_algorithm_state_dict


def subnets():
    trainer, step = trainers.subnets()
    return step, trainer.state_dict, trainer.load_state_dict


def hook():
    state, step = trainers.hook()
    return step, state.state_dict, state.load_state_dict


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
