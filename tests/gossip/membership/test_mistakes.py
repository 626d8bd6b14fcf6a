"""Processes, algorithms and arguments that cannot be members: one sentence each."""

import itertools
import re
from unittest import mock

import pytest
import torch
from torch import nn

from pyparallel import GossipDataParallel
from pyparallel.gossip import ADPSGD, DPSGD, EASGD, OSGP, SGP, AllReduce, GossipState
from pyparallel.gossip.membership import epochs
from pyparallel.gossip.topology import Hypercube, OnePeerExponential
from pyparallel.optim import SGD
from tests.gossip.membership.service import Served
from tests.gossip.membership.training import (
    exponential,
    make,
    on_service,
    step,
    symmetric,
)


def refused(address, store, rank, size):
    """Processes that cannot be members, while two others train."""
    errors = []

    def error_of(*arguments, **options):
        with pytest.raises((ValueError, TypeError)) as caught:
            make(*arguments, **{"start": 1, "deadline": 20.0} | options)
        return str(caught.value)

    if rank == 2:
        store.wait(["trained"])
        with mock.patch.object(epochs, "_NAME_SECONDS", 0.3):
            second = error_of(address, 0, exponential)  # a second one with the name r0
        errors = [
            second,
            error_of(address, 2, exponential, width=7),
            error_of(address, 2, symmetric),
            error_of(address, 2, exponential, optimizer=SGD),
        ]
        store.set("refused", "")
        return errors
    module, stepped, trainer, membership = make(address, rank, exponential, start=2, deadline=20.0)
    store.set("trained", "")
    last = -1
    for index in itertools.count():  # in rounds of two ranks none is two steps ahead
        step(module, stepped, trainer)
        if rank == 0 and last < 0 and store.check(["refused"]):
            store.set("last", str(index + 3))
        if last < 0 and store.check(["last"]):
            last = int(store.get("last"))
        if index == last:
            break
    with pytest.raises(ValueError, match=r"model must have ranks that stay"):
        GossipState(trainer, stepped)
    with pytest.raises(ValueError, match=r"join\(\) must not be used with membership"):
        trainer.join().__enter__()
    with trainer.consensus():  # on both, after which they end together
        pass
    assert (trainer.epoch, trainer.members) == (1, ("r0", "r1"))
    store.set(f"done {rank}", "")
    store.wait(["done 0", "done 1"])
    return [change.epoch for change in membership.changes]


def test_processes_that_do_not_fit(ranks):
    first, second, errors = ranks.run(3, on_service, refused)
    assert first == second == [1]
    for error, text in zip(
        errors,
        (
            "name must be of one process, got a second one with 'r0'",
            "the members' parameter 0, 0.weight float32 [5, 6], got 0.weight float32 [5, 7]",
            "must have the members' algorithm, SGP(",
            "must have the members' buckets, in the order of the module's parameters, got of the",
        ),
        strict=True,
    ):
        assert text in error
    assert all("they go on without it" in error for error in errors[1:])


@pytest.mark.parametrize(
    ("algorithm", "error", "text"),
    [
        (SGP(OnePeerExponential(4)), ValueError, "topology must be a class or left out with membe"),
        (SGP(Hypercube), ValueError, "num_ranks must be a power of two, got 3"),
        (DPSGD(OnePeerExponential), ValueError, "topology must be symmetric in every round"),
        (AllReduce(), ValueError, "as all others need all ranks to stay, got AllReduce"),
        (OSGP(), ValueError, "all ranks to stay, got OSGP"),
        (ADPSGD(), ValueError, "all ranks to stay, got ADPSGD"),
        (EASGD(), ValueError, "all ranks to stay, got EASGD"),
        (lambda n: SGP(), TypeError, "algorithm must be an object such as SGP"),
    ],
)
def test_algorithms_that_cannot_change_their_ranks(algorithm, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make(("", 0), 0, algorithm)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deadline": 0}, "deadline must be a positive and finite number of seconds, got 0"),
        ({"start": 0}, "start must be"),
        ({"name": "a:b"}, "name must be a text without colons, got 'a:b'"),
    ],
)
def test_memberships_with_wrong_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        Served(("", 0), **{"name": "a"} | options)


def test_parameters_that_cannot_be_sent_with_weights():
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"float32 and on the CPU with membership, .* got weight"):
        GossipDataParallel(module, optimizer, exponential, membership=Served(("", 0), "a"))


def test_trainers_with_wrong_memberships():
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="membership must be an object such as Lighthouse"):
        GossipDataParallel(module, optimizer, exponential, membership="lighthouse")
    with pytest.raises(ValueError, match="process_group and mesh must be None"):
        GossipDataParallel(
            module, optimizer, exponential, membership=Served(("", 0), "a"), process_group="group"
        )
