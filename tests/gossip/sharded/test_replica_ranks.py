"""Replicas of unequal numbers of shards train as unsharded ones on the joined batches.

The reference is written from Assran et al.'s algorithms, for all replicas in one process: plain
modules, torch's optimizers on the numerators, and a mixing matrix.
"""

import contextlib
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import pyparallel.optim
from pyparallel import GossipDataParallel
from pyparallel.comm import DisagreementError, NonFiniteError, PeerError
from pyparallel.compression import Int8
from pyparallel.gossip import (
    ADPSGD,
    DPSGD,
    OSGP,
    SGP,
    AllReduce,
    DiLoCo,
    GossipState,
    LocalSGD,
    SlowMo,
)
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.topology import Complete, FromMatrix, OnePeerExponential, Ring
from tests.gossip.sharded.test_shards import backward, batch, build, shard
from tests.gossip.sharded.test_states import full, shared_folder, snapshot
from tests.workers import assert_equal_on_all_ranks, call_each

TWO, THREE = [[0, 1], [2, 3, 4]], [[4], [0, 2], [1, 3]]
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
FUSED_SGD, FUSED_ADAMW = pyparallel.optim.SGD, pyparallel.optim.AdamW
SKEWED = {2: [[0.7, 0.4], [0.3, 0.6]], 3: [[0.5, 0.0, 0.2], [0.3, 0.9, 0.1], [0.2, 0.1, 0.7]]}


def make_mesh(replicas):
    group, _ = dist.new_subgroups_by_enumeration(replicas)
    return DeviceMesh.from_group(group, "cpu")


def place(replicas):
    """Return the index of this rank's replica, and of its shard."""
    rank = dist.get_rank()
    return next((i, each.index(rank)) for i, each in enumerate(replicas) if rank in each)


def start(replicas, algorithm, kind=SGD, dtype=torch.float32, frozen=False, **options):
    """Return a sharded module, its optimizer and the trainer; ranks begin with unequal values."""
    module = build(dtype=dtype)
    module.last.weight.requires_grad_(not frozen)
    module = shard(module, make_mesh(replicas))
    if place(replicas)[0]:
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1.0)  # to be overwritten by the first replica's
    optimizer = kind(module.parameters(), lr=0.05, weight_decay=0.01)
    trainer = GossipDataParallel(module, optimizer, algorithm, replica_ranks=replicas, **options)
    return module, optimizer, trainer


def train(replicas, trainer, optimizer, steps):
    for step in steps:
        backward(trainer, optimizer, *batch(step, *place(replicas)))
        optimizer.step()


class Reference:
    """All replicas in one process, each on the batches of all its ranks.

    A round is the product of the mixing matrix with numerators x and weights w. What is sent with a
    delay is added that many steps later: "before" the update of that step, or "after" what that
    step sends.
    """

    def __init__(self, replicas, matrix, kind, dtype, delay=0, merges="before"):
        self.sizes, self.matrix = [len(each) for each in replicas], torch.tensor(matrix).double()
        self.modules = [build(dtype=dtype) for _ in replicas]
        self.optimizers = [kind(m.parameters(), lr=0.05, weight_decay=0.01) for m in self.modules]
        self.w = torch.ones(len(replicas), dtype=torch.float64)
        self.delay, self.merges, self.flight = delay, merges, {}

    def step(self, step):
        for index, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            batches = [batch(step, index, each) for each in range(self.sizes[index])]
            backward(module, optimizer, *map(torch.cat, zip(*batches, strict=True)))
        self.scale(self.w)  # x = w z, on which the optimizers step
        if self.merges == "before":
            self.merge(step)
        for optimizer in self.optimizers:
            optimizer.step()
        if not self.flight or self.delay == 1 or self.merges == "after":
            self.send(step)
        if self.merges == "after" or not self.delay:
            self.merge(step)
        self.scale(1 / self.w)

    @torch.no_grad()
    def scale(self, factors):
        for factor, module in zip(factors, self.modules, strict=True):
            for p in module.parameters():
                p.mul_(factor)

    def columns(self):
        return zip(*(m.parameters() for m in self.modules), strict=True)

    @torch.no_grad()
    def send(self, step):
        kept = self.matrix.diag().diag()
        sent = []
        for column in self.columns():
            stacked = torch.stack([p.double() for p in column])
            sent.append(torch.tensordot(self.matrix - kept, stacked, 1))
            for p, share in zip(column, kept.diag(), strict=True):
                p.mul_(share)
        self.flight[step + self.delay] = sent, (self.matrix - kept) @ self.w
        self.w = kept @ self.w

    @torch.no_grad()
    def merge(self, step):
        values, masses = self.flight.pop(step, ([], 0.0))
        for column, added in zip(self.columns(), values, strict=False):
            for p, each in zip(column, added, strict=True):
                p.add_(each)
        self.w = self.w + masses

    @torch.no_grad()
    def average(self):
        return [
            sum(w * p.double() for w, p in zip(self.w, column, strict=True)) / self.w.sum()
            for column in self.columns()
        ]

    @torch.no_grad()
    def distance(self):
        means = self.average()
        squares = sum(
            (p.double() - mean).square().sum()
            for module in self.modules
            for p, mean in zip(module.parameters(), means, strict=True)
        )
        return float((squares / len(self.modules)).sqrt())


def owners(num_rows, size):
    """Return the rows of each shard, by ``torch.chunk``."""
    chunks = [set(each.tolist()) for each in torch.arange(num_rows).chunk(size)]
    return chunks + [set()] * (size - len(chunks))


def bytes_to_others(replicas, module):
    """Return the bytes of this rank's rows that the ranks of all other replicas hold too."""
    own, index = place(replicas)
    total = 0
    for p in module.parameters():
        mine = owners(p.shape[0], len(replicas[own]))[index]
        for number, ranks in enumerate(replicas):
            shared = sum(len(mine & rows) for rows in owners(p.shape[0], len(ranks)))
            total += (number != own) * shared * p[0].numel() * p.element_size()
    return total


def algorithm_of(name, num_replicas):
    matrix = FromMatrix(np.array(SKEWED[num_replicas]))
    if name == "dpsgd":
        return DPSGD(Complete(num_replicas))
    return OSGP(matrix) if name == "osgp" else SGP(matrix, overlap=int(name[-1]))


def reference_of(name, replicas, kind, dtype):
    n = len(replicas)
    if name == "dpsgd":
        return Reference(replicas, [[1 / n] * n] * n, kind, dtype)
    delay, merges = (1, "after") if name == "osgp" else (int(name[-1]), "before")
    return Reference(replicas, SKEWED[n], kind, dtype, delay, merges)


def equals_joined_batches(rank, name, replicas, kind=SGD, dtype=torch.float32, plain_kind=None):
    exact = 1e-6 if dtype == torch.float32 else 1e-12
    module, optimizer, trainer = start(replicas, algorithm_of(name, len(replicas)), kind, dtype)
    reference = reference_of(name, replicas, plain_kind or kind, dtype)
    index, _ = place(replicas)
    for step in range(5):
        train(replicas, trainer, optimizer, [step])
        reference.step(step)
        if step == 0:  # what each rank has sent: its rows that others hold, and headers of 64 bytes
            others = len(replicas) - 1
            skips = name not in ("dpsgd",) and len(replicas) == 3 and index == 1
            if not skips:  # one replica of the skewed graph does not send to all others
                headers = trainer.bytes_sent - bytes_to_others(replicas, module)
                assert headers % 64 == 0 and 0 < headers <= 64 * 2 * others, headers
        for mine, theirs in zip(module.parameters(), reference.modules[index].parameters(),
                                strict=True):  # fmt: skip
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=exact, atol=exact)
        assert float(trainer.push_sum_weight) == pytest.approx(float(reference.w[index]), abs=1e-12)
    trainer.flush()
    for due in sorted(reference.flight):
        reference.scale(reference.w)
        reference.merge(due)
        reference.scale(1 / reference.w)
    assert trainer.consensus_distance() == pytest.approx(reference.distance(), abs=1e-4)
    with trainer.consensus() as average:
        values = [p.full_tensor() for p in average.parameters()]
        for mine, theirs in zip(values, reference.average(), strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=exact, atol=exact)
        assert_equal_on_all_ranks([each.tolist() for each in values])
    trainer.close()


QUICK = [
    (equals_joined_batches, "sgp-0", TWO),
    (equals_joined_batches, "sgp-0", TWO, FUSED_ADAMW, torch.float32, ADAMW),
    (equals_joined_batches, "osgp", THREE, SGD, torch.float64),
    (equals_joined_batches, "dpsgd", TWO, ADAMW, torch.float64),
]


def test_unequal_shards_equal_joined_batches(ranks):
    ranks.run(5, call_each, QUICK)
