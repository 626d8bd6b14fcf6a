"""Compressed messages between replicas of unequal numbers of shards, against rules written out.

The rule: what one rank of each replica holds is encoded by itself, once for all that receive it,
with a state on the rank that sends it. The references are unsharded replicas on joined batches that
encode the same parts.
"""

import pytest
import torch

from pyparallel.compression import BufferLayout, ErrorFeedback, Int8, TopK
from pyparallel.gossip import DiLoCo, LocalSGD, NoLoCo
from pyparallel.gossip.topology import RandomMatching
from tests.gossip.sharded.test_replica_outer_steps import INTERVAL, OuterReference
from tests.gossip.sharded.test_replica_ranks import (
    ADAMW,
    FUSED_ADAMW,
    LIMITS,
    SGD,
    THREE,
    TWO,
    owners,
    place,
    start,
    train,
)
from tests.workers import assert_equal_on_all_ranks, call_each

SMALL = Int8(block_size=32)  # several blocks in most parts


class Parts:
    """What each rank encodes of the parameters of unsharded replicas: by rank, entries of all."""

    def __init__(self, replicas, parameters):
        self.replicas, self.of_holders, offset = replicas, {}, 0
        for p in parameters:
            shards = [owners(p.shape[0], len(ranks)) for ranks in replicas]
            for row in range(p.shape[0]):
                places = [next(i for i, s in enumerate(each) if row in s) for each in shards]
                holders = tuple(r[i] for r, i in zip(replicas, places, strict=True))
                begin = offset + row * p[0].numel()
                entries = range(begin, begin + p[0].numel())
                self.of_holders.setdefault(holders, []).extend(entries)
            offset += p.numel()
        self.entries = [torch.tensor(each) for _, each in sorted(self.of_holders.items())]
        self.layouts = [BufferLayout.flat(len(each)) for each in self.entries]

    def states(self, compressor, replica):
        return [compressor.init(each, torch.device("cpu"), replica) for each in self.layouts]

    def encode(self, flat, compressor, states):
        """Return what receivers decode of a tensor."""
        decoded = torch.zeros_like(flat)
        for entries, layout, state in zip(self.entries, self.layouts, states, strict=True):
            part = torch.empty(len(entries))
            message = compressor.compress(flat[entries].clone(), state)
            decoded[entries] = compressor.decompress(message, layout, part)
        return decoded

    def bytes_of(self, rank, receivers, num_bytes):
        """Return what a rank sends to replicas if so many bytes encode a number of entries."""
        own = next(i for i, ranks in enumerate(self.replicas) if rank in ranks)
        parts = [(h, len(e)) for h, e in sorted(self.of_holders.items()) if h[own] == rank]
        here = self.replicas[own].index(rank), len(self.replicas[own])
        total = 0
        for receiver in receivers:
            total += sum(num_bytes(n) for _, n in parts)
            links = {holders[receiver] for holders, _ in parts}
            size = len(self.replicas[receiver])
            links |= {  # also those that would have rows of a larger tensor in common
                each
                for at, each in enumerate(self.replicas[receiver])
                if here[0] * size < (at + 1) * here[1] and at * here[1] < (here[0] + 1) * size
            }
            total += 64 * len(links)
        return total


def flat(tensors):
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def assign(tensors, values):
    for each, part in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        each.copy_(part.view_as(each))


class CompressedOuterReference(OuterReference):
    """Outer steps of the means of decoded differences, in float32."""

    def __init__(self, algorithm, replicas, kind):
        super().__init__(algorithm, replicas, kind, torch.float32)
        n = len(replicas)
        self.parts = Parts(replicas, list(self.modules[0].parameters()))
        self.states = [self.parts.states(algorithm.compressor, i) for i in range(n)]
        self.phi = [flat(m.parameters()) for m in self.modules]
        self.m = [torch.zeros_like(each) for each in self.phi]

    @torch.no_grad()
    def outer_step(self, number):
        a, compressor = self.algorithm, self.algorithm.compressor
        theta = [flat(m.parameters()) for m in self.modules]
        for ranks in self.pairs(number):
            if len(ranks) == 1:
                self.alone(ranks[0], theta)
                continue
            differences = [theta[i] - self.phi[i] for i in ranks]
            if isinstance(a, NoLoCo):
                differences = [each * (a.outer_lr / a.pull) for each in differences]
            mean = sum(
                self.parts.encode(each, compressor, self.states[i])
                for i, each in zip(ranks, differences, strict=True)
            ) / len(ranks)
            middle = sum(self.phi[i] for i in ranks) / len(ranks)
            for i in ranks:
                if isinstance(a, LocalSGD):
                    self.phi[i] = self.phi[i] + mean
                elif isinstance(a, DiLoCo):
                    self.m[i].mul_(0.9).sub_(mean)
                    self.phi[i] = self.phi[i] - 0.7 * (0.9 * self.m[i] - mean)
                else:
                    pulled = self.in_turn(middle - self.phi[i], number)
                    self.m[i].mul_(a.momentum).add_(a.pull * (mean + pulled))
                    self.phi[i] = self.phi[i] + self.m[i]
                assign(list(self.modules[i].parameters()), self.phi[i])

    def alone(self, i, theta):
        a = self.algorithm
        self.m[i].mul_(a.momentum).add_(a.outer_lr * (theta[i] - self.phi[i]))
        self.phi[i] = self.phi[i] + self.m[i]
        assign(list(self.modules[i].parameters()), self.phi[i])

    def in_turn(self, values, number):
        """Return the values of each part's slice of a turn, and zeros."""
        kept, turns = torch.zeros_like(values), self.algorithm.pull_turns
        for each in self.parts.entries:
            n, turn = len(each), number % turns
            chosen = each[n * turn // turns : n * (turn + 1) // turns]
            kept[chosen] = values[chosen]
        return kept


def size_of(compressor, turns=None):
    """Return the bytes that encode a number of entries, and of the first slice of so many turns."""
    compressor = getattr(compressor, "compressor", compressor)

    def size(n):
        first = 0 if turns is None else 4 * (n // turns)
        if isinstance(compressor, TopK):
            return first + 8 * max(1, round(compressor.density * n))
        return first + n + 4 * -(-n // compressor.block_size)

    return size


def check_close(module, reference, compressor, what):
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        difference = (mine.full_tensor() - theirs).detach().abs()
        if isinstance(getattr(compressor, "compressor", compressor), Int8):
            # A value between two codes may become either, and then differs by their distance.
            assert (difference > 1e-6).float().mean() < 0.05, what
            assert difference.max() < 1e-3, (what, float(difference.max()))
        else:
            assert difference.max() < 1e-6, (what, float(difference.max()))


def takes_outer_steps(rank, algorithm, replicas, kind=SGD, plain_kind=None):
    module, optimizer, trainer = start(replicas, algorithm, kind)
    reference = CompressedOuterReference(algorithm, replicas, plain_kind or kind)
    index, _ = place(replicas)
    for step in range(3 * INTERVAL):
        train(replicas, trainer, optimizer, [step])
        reference.step(step)
        if step % INTERVAL == 1:
            reference.outer_step(step // INTERVAL)
        if step == INTERVAL - 1:
            (group,) = [each for each in reference.pairs(0) if index in each]
            others = [each for each in group if each != index]
            turns = getattr(algorithm, "pull_turns", None)
            expected = reference.parts.bytes_of(rank, others, size_of(algorithm.compressor, turns))
            assert trainer.bytes_sent == expected
        check_close(module, reference.modules[index], algorithm.compressor, (algorithm, step))
    with trainer.consensus() as average:
        values = [p.full_tensor() for p in average.parameters()]
        assert_equal_on_all_ranks([each.tolist() for each in values])
    if not isinstance(algorithm, NoLoCo):
        assert trainer.consensus_distance() == 0  # equal to the last bit
    trainer.close()


def outer_rows(replicas):
    matching = RandomMatching(len(replicas))
    options = {"momentum": 0.5, "outer_lr": 0.6, "pull": 0.4, "pull_turns": 3}
    yield takes_outer_steps, DiLoCo(INTERVAL, compressor=ErrorFeedback(TopK(0.3))), replicas
    yield takes_outer_steps, NoLoCo(matching, INTERVAL, **options, compressor=SMALL), replicas
    yield (takes_outer_steps, LocalSGD(INTERVAL, compressor=ErrorFeedback(SMALL)), replicas,
           FUSED_ADAMW, ADAMW)  # fmt: skip
    top = NoLoCo(matching, INTERVAL, **options, compressor=ErrorFeedback(TopK(0.3)))
    yield takes_outer_steps, top, replicas
    yield takes_outer_steps, DiLoCo(INTERVAL, compressor=SMALL), replicas, FUSED_ADAMW, ADAMW
    yield takes_outer_steps, LocalSGD(INTERVAL, compressor=TopK(0.3)), replicas


def test_compressed_outer_steps_of_unequal_shards(ranks):
    ranks.run(5, call_each, list(outer_rows(TWO))[:2], **LIMITS)


@pytest.mark.slow
def test_every_compressed_outer_step_of_unequal_shards(ranks):
    ranks.run(5, call_each, [*outer_rows(TWO), *outer_rows(THREE)], **LIMITS)
