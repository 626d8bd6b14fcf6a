"""Compressed messages between replicas of unequal numbers of shards, against rules written out.

The rule: what one rank of each replica holds is encoded by itself, once for all that receive it,
with a state on the rank that sends it. The references are unsharded replicas on joined batches that
encode the same parts.
"""

import contextlib
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.comm import PeerError
from pyparallel.compression import BufferLayout, CorruptMessageError, ErrorFeedback, Int8, TopK
from pyparallel.gossip import DPSGD, SGP, DiLoCo, LocalSGD, NoLoCo
from pyparallel.gossip.topology import (
    Complete,
    FromMatrix,
    Lazy,
    OnePeerExponential,
    RandomMatching,
)
from tests.gossip.sharded.test_replica_outer_steps import INTERVAL, OuterReference
from tests.gossip.sharded.test_replica_ranks import (
    ADAMW,
    FUSED_ADAMW,
    FUSED_SGD,
    LIMITS,
    SGD,
    SKEWED,
    THREE,
    TWO,
    Largest,
    Reference,
    owners,
    place,
    resumes_to_the_bit,
    start,
    train,
)
from tests.gossip.sharded.test_shards import Uneven, backward, batch, build_even
from tests.gossip.sharded.test_states import snapshot
from tests.workers import assert_equal_on_all_ranks, call_each

SMALL = Int8(block_size=32)  # several blocks in most parts


def four_rows():
    """A model of which the last of three ranks has nothing."""
    return nn.Sequential(nn.Linear(6, 4))


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

    def __init__(self, algorithm, replicas, kind, make):
        super().__init__(algorithm, replicas, kind, torch.float32, make)
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
    found = flat(p.full_tensor() for p in module.parameters())
    difference = (found - flat(reference.parameters())).abs()
    most = float(difference.max())
    if isinstance(getattr(compressor, "compressor", compressor), Int8):
        # A value between two codes may become either, and then differs by their distance.
        assert (difference > 1e-6).sum() <= 4, (what, most)
        assert most < 1e-4, (what, most)
    else:
        assert most < 1e-6, (what, most)


def takes_outer_steps(rank, algorithm, replicas, kind=SGD, plain_kind=None, make=Uneven):
    module, optimizer, trainer = start(replicas, algorithm, kind, make=make)
    reference = CompressedOuterReference(algorithm, replicas, plain_kind or kind, make)
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
    fed_back = DiLoCo(INTERVAL, compressor=ErrorFeedback(SMALL))
    yield takes_outer_steps, fed_back, replicas, SGD, SGD, four_rows


class CompressedReference(Reference):
    """PushSum with compressed differences to what receivers know of z, of each part by itself."""

    def __init__(self, algorithm, replicas, kind, make):
        eye = np.eye(len(replicas))
        super().__init__(replicas, eye, kind, torch.float32, algorithm.overlap, make=make)
        self.algorithm = algorithm
        self.parts = Parts(replicas, list(self.modules[0].parameters()))
        self.known, self.states = {}, {}

    @torch.no_grad()
    def send(self, step):
        topology, compressor = self.algorithm.topology, self.algorithm.compressor
        matrix = torch.tensor(topology.mixing_matrix(step))
        shares = matrix - matrix.diag().diag()
        sent, masses = [], shares * self.w  # masses[i, j] from j to i
        for i, module in enumerate(self.modules):
            z, key = flat(module.parameters()) / self.w[i], (i, topology.out_peers(i, step))
            if key not in self.known:
                self.known[key], self.states[key] = z.clone(), self.parts.states(compressor, i)
            else:
                difference = z - self.known[key]
                self.known[key] += self.parts.encode(difference, compressor, self.states[key])
            given = masses[:, i].sum()
            z += (z - self.known[key]) * (given / (self.w[i] - given))
            assign(list(module.parameters()), (self.w[i] - given) * z)
            sent.append(self.known[key].double())
        self.w = self.w - masses.sum(0)
        self.flight[step + self.delay] = masses @ torch.stack(sent), masses.sum(1)

    @torch.no_grad()
    def merge(self, step):
        if step not in self.flight:
            return
        values, masses = self.flight.pop(step)
        for module, added in zip(self.modules, values, strict=True):
            assign(list(module.parameters()), flat(module.parameters()) + added)
        self.w = self.w + masses


def gossips(rank, algorithm, replicas, kind=SGD, plain_kind=None, make=Uneven):
    module, optimizer, trainer = start(replicas, algorithm, kind, make=make)
    reference = CompressedReference(algorithm, replicas, plain_kind or kind, make)
    index, _ = place(replicas)
    sent, known, size = 0, set(), size_of(algorithm.compressor)
    for step in range(6):
        train(replicas, trainer, optimizer, [step])
        reference.step(step)
        receivers = algorithm.topology.out_peers(index, step)
        is_first, known = receivers not in known, {*known, receivers}
        count = (lambda n: 4 * n) if is_first else size
        sent += reference.parts.bytes_of(rank, receivers, count)
        assert trainer.bytes_sent == sent, step
        check_close(module, reference.modules[index], algorithm.compressor, (algorithm, step))
        assert float(trainer.push_sum_weight) == pytest.approx(float(reference.w[index]), abs=1e-12)
    trainer.flush()
    for due in sorted(reference.flight):
        reference.scale(reference.w)
        reference.merge(due)
        reference.scale(1 / reference.w)
    with trainer.consensus() as average:
        values = [p.full_tensor() for p in average.parameters()]
        assert_equal_on_all_ranks([each.tolist() for each in values])
        for mine, theirs in zip(values, reference.average(), strict=True):  # mass is conserved
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=1e-6)
    trainer.close()


def gossip_rows(replicas):
    n = len(replicas)
    skewed, turning = FromMatrix(np.array(SKEWED[n])), Lazy(OnePeerExponential(n), 0.7)
    yield gossips, SGP(skewed, compressor=SMALL), replicas
    yield gossips, SGP(turning, overlap=1, compressor=TopK(0.3)), replicas
    yield gossips, DPSGD(Lazy(Complete(n), 0.5), compressor=SMALL), replicas, FUSED_ADAMW, ADAMW
    yield gossips, SGP(skewed, overlap=1, compressor=SMALL), replicas, FUSED_SGD, SGD
    yield gossips, DPSGD(Lazy(Complete(n), 0.5), overlap=1, compressor=TopK(0.3)), replicas
    yield gossips, SGP(Lazy(RandomMatching(n), 0.5), compressor=TopK(0.3)), replicas
    yield gossips, SGP(skewed, overlap=1, compressor=SMALL), replicas, SGD, SGD, four_rows


def test_compressed_gossip_of_unequal_shards(ranks):
    ranks.run(5, call_each, list(gossip_rows(TWO))[:2], **LIMITS)


@pytest.mark.slow
def test_every_compressed_gossip_of_unequal_shards(ranks):
    ranks.run(5, call_each, [*gossip_rows(TWO), *gossip_rows(THREE)], **LIMITS)


@pytest.mark.slow
def test_compressed_outer_steps_of_unequal_shards(ranks):
    ranks.run(5, call_each, list(outer_rows(TWO))[:2], **LIMITS)


@pytest.mark.slow
def test_every_compressed_outer_step_of_unequal_shards(ranks):
    ranks.run(5, call_each, [*outer_rows(TWO), *outer_rows(THREE)], **LIMITS)


def refuses_together(rank, algorithm):
    """A part that one rank cannot decode is merged on no rank of its replica, nor is its mass."""
    module, optimizer, trainer = start(TWO, algorithm)
    train(TWO, trainer, optimizer, range(3))
    trainer.flush()
    weight, before = float(trainer.push_sum_weight), snapshot(module)
    backward(trainer, optimizer, *batch(3, *place(TWO)))
    for p in module.parameters():  # so that the step moves nothing but by the round
        p.grad = None
    refusal = mock.patch.object(Int8, "decompress", side_effect=CorruptMessageError("refused"))
    outcome = None
    with refusal if rank == 3 else contextlib.nullcontext():
        try:
            optimizer.step()
            trainer._averager.flush()  # without the other replica, which raises nothing
        except (PeerError, CorruptMessageError) as error:
            outcome = str(error)
    if rank > 1:
        text = "got a corrupt one" if rank == 3 else "got an error on rank 3, which says why"
        assert text in outcome, outcome
        assert rank != 3 or "from rank 0" in outcome or "from rank 1" in outcome, outcome
        assert float(trainer.push_sum_weight) == weight
        torch.testing.assert_close(snapshot(module), before)
    else:
        assert outcome is None, outcome
    dist.barrier()
    trainer.close()


def holds_no_whole_tensor(rank, algorithm):
    """No operation of a step returns a tensor that is larger than the rank's own buffer."""
    module, optimizer, trainer = start(TWO, algorithm, make=build_even)
    (buffer,) = trainer._buckets.buffers
    train(TWO, trainer, optimizer, [0])  # what compressors draw up once
    backward(trainer, optimizer, *batch(1, *place(TWO)))
    with Largest() as largest:
        optimizer.step()
    assert 0 < largest.numel <= buffer.numel() < sum(p.numel() for p in module.parameters())
    trainer.close()


def whole_rows():
    gossip = SGP(FromMatrix(np.array(SKEWED[2])), overlap=1, compressor=SMALL)
    outer = DiLoCo(2, compressor=ErrorFeedback(SMALL))
    for algorithm in (gossip, outer):
        yield refuses_together, algorithm
        yield resumes_to_the_bit, algorithm, FUSED_ADAMW
        yield holds_no_whole_tensor, algorithm


@pytest.mark.slow
def test_messages_are_of_whole_replicas(ranks):
    ranks.run(5, call_each, list(whole_rows())[1:4:2], **LIMITS)


@pytest.mark.slow
def test_all_messages_are_of_whole_replicas(ranks):
    delayed = DiLoCo(2, compressor=ErrorFeedback(TopK(0.3)), delay=1)
    rows = [*whole_rows(), (resumes_to_the_bit, delayed, SGD)]
    ranks.run(5, call_each, rows, **LIMITS)
