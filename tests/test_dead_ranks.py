"""One catalogue of trainers and of faults of a rank: all others end with an error that names it.

A case trains up to the place of the fault, and goes on after it. The cases of a run share their
processes, and each has a process group of its own, so that one death ends all of them.
"""

import os
import re
import signal
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pyparallel import GossipDataParallel
from pyparallel.comm import PeerError, Run, reports
from pyparallel.comm.collectives import Collectives
from pyparallel.comm.process_groups import create_group
from pyparallel.compression import Cast, Int8, TopK, compress_ddp, compress_fsdp
from pyparallel.gossip import SGP, AllReduce
from pyparallel.gossip.topology import Complete, OnePeerExponential, Ring
from pyparallel.subnets import Partition, SubnetTrainer
from tests.cases import nightly, slow
from tests.gossip.every_algorithm import EVERY_ALGORITHM
from tests.workers import observe_ranks, store_barrier

sgd = partial(torch.optim.SGD, lr=0.01)


NUM_RANKS, VICTIM, STEP = 4, 2, 6


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8))


def new_group(ranks=range(NUM_RANKS)):
    """Return a group with the timeout of all ranks' group."""
    return create_group(ranks, None)


def loop(forward, optimizer, num_steps=1000, record_loss=None):
    """Train; yield in a step, where the victim fails."""
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = forward(torch.ones(4, 40)).square().mean()
        if step == STEP:
            yield
        loss.backward()
        if record_loss:
            record_loss(loss)
        optimizer.step()


def wrap(algorithm, process_group=None):
    module = model()
    optimizer = sgd(module.parameters())
    return GossipDataParallel(module, optimizer, algorithm, process_group=process_group), optimizer


def gossip(rank, algorithm):
    trainer, optimizer = wrap(algorithm)
    yield from loop(trainer, optimizer, record_loss=trainer.record_loss)
    trainer.flush()


def join(rank, algorithm):
    """Ranks have unequal numbers of batches; the victim fails when rank 0 has none left."""
    trainer, optimizer = wrap(algorithm)
    with trainer.join():
        yield from loop(trainer, optimizer, num_steps=1000 if rank else 3)


def subgroup(rank):
    """Errors name global ranks, and the rounds after a failed one raise its error again."""
    if rank not in (VICTIM, 3):
        return
    trainer, optimizer = wrap(SGP(Complete(2)), new_group([VICTIM, 3]))
    yield from loop(trainer, optimizer, num_steps=STEP)
    yield
    errors = []
    for _ in range(3):
        trainer(torch.ones(4, 40)).sum().backward()
        with pytest.raises(PeerError) as caught:
            optimizer.step()
        errors.append(str(caught.value))
    assert errors == errors[:1] * 3
    raise caught.value


def subnets(rank, interval):
    trainer = SubnetTrainer(model(), sgd, Partition(), interval=interval)
    yield from loop(trainer, trainer.optimizer)


def ddp(rank, compressor, **options):
    replica = DistributedDataParallel(model(), process_group=new_group(), **options)
    compress_ddp(replica, compressor)
    yield from loop(replica, sgd(replica.parameters()))


def fsdp(rank, compressors):
    module, group = model(), new_group()
    for part in (module[0], module):
        fully_shard(part, mesh=DeviceMesh.from_group(group, "cpu"))
    compress_fsdp(module, process_group=group, **compressors)
    yield from loop(module, sgd(module.parameters()))


CALLS = {
    "consensus": lambda trainer: trainer.consensus().__enter__(),
    "distance": lambda trainer: trainer.consensus_distance(),
    "flush": lambda trainer: trainer.flush(),
    "state": lambda trainer: trainer.algorithm_state_dict(),
    "load": lambda trainer: trainer.load_algorithm_state_dict({}),
}


def call(rank, name):
    """The victim fails before a call of all ranks."""
    trainer, optimizer = wrap(SGP(Ring(NUM_RANKS)))
    yield from loop(trainer, optimizer, num_steps=3)
    yield
    CALLS[name](trainer)


def construction(rank):
    store_barrier("construction")
    yield
    wrap(SGP(Ring(NUM_RANKS)))


COLLECTIVES = {
    "all-reduce": lambda each: each.all_reduce_(torch.ones(2)),
    "broadcast": lambda each: each.broadcast_(torch.ones(2), VICTIM),
    "all-to-all": lambda each: each.all_to_all(torch.ones(4), [1] * 4, [1] * 4),
    "all-gather": lambda each: each.all_gather(torch.ones(2)),
    "comparison of all ranks' arguments": lambda each: each.run.agree([], None),
    "barrier": lambda each: each.run.barrier(),
}


def collectives(rank):
    """The first collective after the fault, and all others after it, name it and the collective."""
    found = Collectives(Run(new_group()))
    found.all_reduce_(torch.ones(1))
    found.run.counts.reset(STEP)
    yield
    for name, call_it in COLLECTIVES.items():
        with pytest.raises(PeerError) as caught:
            call_it(found)
        place = f"rank {rank}" if "arguments" in name else f"rank {rank}, step {STEP}"
        failed = "not all ranks reached the barrier" if name == "barrier" else f"the {name} failed"
        what = f"{failed}: rank {VICTIM} died, or ended without this call ("
        assert str(caught.value).startswith(f"{place}: {what}"), caught.value
    raise caught.value


ALGORITHMS = {name: make(NUM_RANKS) for name, make in EVERY_ALGORITHM.items()}
CASES = {
    **{name: (gossip, algorithm) for name, algorithm in ALGORITHMS.items()},
    "sgp-complete": (gossip, SGP(Complete(NUM_RANKS))),
    "allreduce, unused": (gossip, AllReduce(find_unused_parameters=True)),
    "subgroup": (subgroup,),
    **{name: (call, name) for name in CALLS},
    "subnets": (subnets, 1),
    "subnets 4": (subnets, 4),
    "ddp int8": (ddp, Int8()),
    "ddp cast": (ddp, Cast(torch.bfloat16)),
    "ddp cast, wide": (ddp, Cast(torch.bfloat16, accumulate=torch.bfloat16)),
    "ddp top-k": (ddp, TopK(0.1)),
    "fsdp": (fsdp, {"gradients": Int8(), "parameters": Int8()}),
    "fsdp gradients": (fsdp, {"gradients": Int8()}),
    "fsdp parameters": (fsdp, {"parameters": Int8()}),
    "collectives": (collectives,),
    "construction": (construction,),
    # In these the victim fails while others are inside: they must be the last of their runs.
    **{
        f"join, {name}": (join, ALGORITHMS[name])
        for name in ("sgp", "localsgd", "allreduce", "adpsgd")
    },
}
# The others are slow or nightly: they come to the same calls.
FAST = ["sgp", "subgroup", "subnets", "ddp cast", "fsdp gradients", "collectives"]
SLOW = ["allreduce, unused", "hierarchical-osgp", "consensus", "fsdp", "construction", "join, sgp"]


def stop():
    """Stop until the others have ended, and rank 0 kills this process."""
    dist.group.WORLD.get_group_store().set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {"dies": lambda: os._exit(9), "ends": lambda: None, "stops": stop}


def fail_in(rank, fault, names):
    """Return by case the error that this rank ends with, after the victim has failed."""
    reports._CLOSED_SECONDS = 0.2  # which each case waits for
    cases = {name: CASES[name][0](rank, *CASES[name][1:]) for name in names}
    store, errors = dist.group.WORLD.get_group_store(), {}

    def go_on(name):
        try:
            next(cases[name], None)
        except RuntimeError as error:
            errors[name] = f"{type(error).__name__}: {error}"

    for name in names:
        go_on(name)
    if rank == VICTIM:
        FAULTS[fault]()
        return None
    for name in reversed(names):  # of the last one a rank may have come to its error
        if name not in errors:
            go_on(name)
        store.set(f"{name}/{rank}", "")
        others = [f"{name}/{other}" for other in range(NUM_RANKS) if other != VICTIM]
        store.wait(others, timedelta(seconds=40))
    if rank == 0 and fault == "stops":
        os.kill(int(store.get("stopped")), signal.SIGKILL)
    return errors


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("dies", FAST),
        ("ends", ["sgp"]),
        slow("stops", ["sgp-complete"]),
        *[slow("dies", [name]) for name in SLOW],
        *[nightly("dies", [name]) for name in CASES if name not in (*FAST, *SLOW)],
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_the_error_names_the_dead_rank_and_the_step(subtests, fault, names):
    timeout = 3 if fault == "stops" else 6
    outcomes = observe_ranks(
        NUM_RANKS, fail_in, fault, names, group_timeout=timeout, time_limit=40 + 5 * len(names)
    )
    assert outcomes[VICTIM].exit_code == {"dies": 9, "ends": 0, "stops": -signal.SIGKILL}[fault]
    how = "did not respond within the process group's timeout" if fault == "stops" else "died, or "
    for name in names:
        with subtests.test(name):
            survivors = [3] if name == "subgroup" else [0, 1, 3]
            errors = {rank: outcomes[rank].value[name] for rank in survivors}
            step = "" if name in ("construction", "load") else r", step \d+"
            for rank, error in errors.items():
                place = rf"rank {rank}(, trainer \d+)?{step}"
                assert re.match(rf"PeerError: {place}: .*: rank {VICTIM} {how}", error), errors
                assert set(re.findall(r"rank (\d)", error)) == {str(rank), str(VICTIM)}, errors
    if "sgp" in names:
        topology = OnePeerExponential(NUM_RANKS)
        for rank in {*topology.out_peers(VICTIM, STEP), *topology.in_peers(VICTIM, STEP)}:
            error = outcomes[rank].value["sgp"]
            assert f"step {STEP + 1}: the message on edge" in error
            assert f"rank {VICTIM} died, or took fewer steps: use join() (" in error
            assert f"{VICTIM} -> {rank}" in error or f"{rank} -> {VICTIM}" in error
