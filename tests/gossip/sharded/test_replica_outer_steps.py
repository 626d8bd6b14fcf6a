"""Outer steps of replicas of unequal numbers of shards, against rules written out in float64."""

import numpy as np
import pytest
import torch

from pyparallel.gossip import DiLoCo, LocalSGD, NoLoCo
from pyparallel.gossip.topology import RandomMatching
from tests.gossip.sharded.test_replica_ranks import (
    ADAMW,
    FUSED_ADAMW,
    LIMITS,
    SGD,
    THREE,
    TWO,
    Reference,
    bytes_to_others,
    place,
    start,
    train,
)
from tests.gossip.sharded.test_shards import Uneven
from tests.workers import assert_equal_on_all_ranks, call_each

INTERVAL = 2


class OuterReference(Reference):
    """Local steps of all replicas, and every second one an outer step, in float64."""

    def __init__(self, algorithm, replicas, kind, dtype, make=Uneven):
        super().__init__(replicas, np.eye(len(replicas)), kind, dtype, make=make)
        self.algorithm = algorithm
        self.phi = [[p.detach().clone() for p in column] for column in self.columns()]
        self.m = [[torch.zeros_like(p) for p in column] for column in self.columns()]

    def pairs(self, number):
        n = len(self.modules)
        if not isinstance(self.algorithm, NoLoCo):
            return [list(range(n))]
        partners = [self.algorithm.topology.partner(i, number) for i in range(n)]
        return {tuple(sorted({i, i if p is None else p})) for i, p in enumerate(partners)}

    @torch.no_grad()
    def outer_step(self, number):
        for ranks in self.pairs(number):
            for column, phi, m in zip(self.columns(), self.phi, self.m, strict=True):
                mean = sum(column[i] for i in ranks) / len(ranks)
                middle = sum(phi[i] for i in ranks) / len(ranks)
                for i in ranks:
                    if isinstance(self.algorithm, LocalSGD):
                        column[i].copy_(mean)
                        continue
                    if isinstance(self.algorithm, DiLoCo):  # SGD with Nesterov momentum
                        gradient = phi[i] - mean
                        m[i].mul_(0.9).add_(gradient)
                        moved = phi[i] - 0.7 * (gradient + 0.9 * m[i])
                    else:  # NoLoCo
                        a = self.algorithm
                        m[i].mul_(a.momentum).add_(a.outer_lr * (mean - middle))
                        m[i].sub_(a.pull * (phi[i] - middle))
                        moved = phi[i] + m[i]
                    column[i].copy_(moved)
                for i in ranks:
                    phi[i].copy_(column[i])


def takes_outer_steps(rank, algorithm, replicas, kind=SGD, dtype=torch.float32, plain_kind=None):
    exact = 2e-6 if dtype == torch.float32 else 1e-12
    module, optimizer, trainer = start(replicas, algorithm, kind, dtype)
    reference = OuterReference(algorithm, replicas, plain_kind or kind, dtype)
    index, _ = place(replicas)
    for step in range(3 * INTERVAL):
        train(replicas, trainer, optimizer, [step])
        reference.step(step)
        if step % INTERVAL == 1:
            reference.outer_step(step // INTERVAL)
        if step == INTERVAL - 1:  # rows that others hold, and a header to each
            alone = (index,) in reference.pairs(0)
            expected = bytes_to_others(replicas, module) if len(replicas) == 2 else None
            sent = trainer.bytes_sent
            assert sent == 0 if alone else expected is None or (sent - expected) / 64 in (1, 2)
        for mine, theirs in zip(module.parameters(), reference.modules[index].parameters(),
                                strict=True):  # fmt: skip
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=exact, atol=exact)
    with trainer.consensus() as average:
        values = [p.full_tensor() for p in average.parameters()]
        assert_equal_on_all_ranks([each.tolist() for each in values])
    trainer.close()


def outer_rows(replicas):
    pairs = NoLoCo(RandomMatching(len(replicas)), INTERVAL, momentum=0.5, outer_lr=0.6, pull=0.4)
    for algorithm in (LocalSGD(INTERVAL), DiLoCo(INTERVAL), pairs):
        yield takes_outer_steps, algorithm, replicas, SGD, torch.float64
        yield takes_outer_steps, algorithm, replicas, FUSED_ADAMW, torch.float32, ADAMW


def test_outer_steps_of_unequal_shards(ranks):
    ranks.run(5, call_each, list(outer_rows(TWO))[2::2], **LIMITS)


@pytest.mark.slow
def test_every_outer_step_of_unequal_shards(ranks):
    ranks.run(5, call_each, [*outer_rows(TWO), *outer_rows(THREE)], **LIMITS)
