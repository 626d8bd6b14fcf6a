"""Replicas of unequal numbers of shards train as unsharded ones on the joined batches.

The reference is written from Assran et al.'s algorithms, for all replicas in one process: plain
modules, torch's optimizers on the numerators, and a mixing matrix.
"""

import contextlib
from collections import OrderedDict
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
from pyparallel.compression import Threshold
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
    StreamingDiLoCo,
)
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.topology import Complete, FromMatrix, OnePeerExponential, Ring
from pyparallel.training.shards import local_of
from tests.gossip.sharded.test_shards import Uneven, backward, batch, build, build_even, shard
from tests.gossip.sharded.test_states import full, shared_folder, snapshot
from tests.workers import assert_equal_on_all_ranks, call_each

TWO, THREE = [[0, 1], [2, 3, 4]], [[4], [0, 2], [1, 3]]
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
FUSED_SGD, FUSED_ADAMW = pyparallel.optim.SGD, pyparallel.optim.AdamW
SKEWED = {  # columns sum to 1, rows do not, so weights differ
    2: [[0.75, 0.375], [0.25, 0.625]],
    3: [[0.5, 0.0, 0.25], [0.25, 0.875, 0.125], [0.25, 0.125, 0.625]],
}
LIMITS = {"time_limit": 240, "group_timeout": 60}  # five processes may share two busy cores


def make_mesh(replicas):
    group, _ = dist.new_subgroups_by_enumeration(replicas)
    return DeviceMesh.from_group(group, "cpu")


def place(replicas):
    """Return the index of this rank's replica, and of its shard."""
    rank = dist.get_rank()
    return next((i, each.index(rank)) for i, each in enumerate(replicas) if rank in each)


def start(replicas, algorithm, kind=SGD, dtype=torch.float32, make=Uneven):
    """Return a sharded module, its optimizer and the trainer; ranks begin with unequal values."""
    module = shard(build(make, dtype), make_mesh(replicas))
    if place(replicas)[0]:
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1.0)  # to be overwritten by the first replica's
    optimizer = kind(module.parameters(), lr=0.05, weight_decay=0.01)
    trainer = GossipDataParallel(module, optimizer, algorithm, replica_ranks=replicas)
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

    def __init__(self, replicas, matrix, kind, dtype, delay=0, merges="before", make=Uneven):
        self.sizes = [len(each) for each in replicas]
        self.matrix = torch.tensor(matrix, dtype=torch.float64)
        self.modules = [build(make, dtype) for _ in replicas]
        self.optimizers = [kind(m.parameters(), lr=0.05, weight_decay=0.01) for m in self.modules]
        self.w = torch.ones(len(replicas), dtype=torch.float64)
        self.delay, self.merges, self.flight = delay, merges, {}

    def step(self, step):
        for index, size in enumerate(self.sizes):
            batches = [batch(step, index, each) for each in range(size)]
            joined = map(torch.cat, zip(*batches, strict=True))
            backward(self.modules[index], self.optimizers[index], *joined)
        self.scale(self.w)  # x = w z, on which the optimizers step
        if self.merges == "before":
            self.merge(step)
        for optimizer in self.optimizers:
            optimizer.step()
        if not self.flight or self.merges == "after":
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
    for step in range(4):
        train(replicas, trainer, optimizer, [step])
        reference.step(step)
        # What a rank has sent: its rows that others hold, and headers of 64 bytes. The second of
        # three replicas does not send to all others.
        if step == 0 and (len(replicas) == 2 or index != 1):
            headers = trainer.bytes_sent - bytes_to_others(replicas, module)
            assert headers / 64 in range(1, 1 + 2 * (len(replicas) - 1))
        for mine, theirs in zip(module.parameters(), reference.modules[index].parameters(),
                                strict=True):  # fmt: skip
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=exact, atol=exact)
        weight = float(trainer.push_sum_weight)
        assert weight == pytest.approx(float(reference.w[index]), abs=1e-12), (step, weight)
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
    (equals_joined_batches, "sgp-0", TWO, FUSED_ADAMW, torch.float32, ADAMW),
    (equals_joined_batches, "osgp", THREE, SGD, torch.float64),
    (equals_joined_batches, "dpsgd", TWO, ADAMW, torch.float64),
]


def test_unequal_shards_equal_joined_batches(ranks):
    ranks.run(5, call_each, QUICK, **LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [TWO, THREE])
def test_every_order_equals_joined_batches(ranks, replicas):
    names = ["sgp-0", "sgp-1", "sgp-2", "osgp", "dpsgd"]
    rows = [(equals_joined_batches, name, replicas, SGD, torch.float64) for name in names]
    rows += [(equals_joined_batches, name, replicas, ADAMW) for name in names]
    fused = ((FUSED_SGD, SGD), (FUSED_ADAMW, ADAMW))
    rows += [
        (equals_joined_batches, name, replicas, kind, torch.float32, plain)
        for name in ("sgp-0", "sgp-1", "osgp")
        for kind, plain in fused
    ]
    ranks.run(5, call_each, rows, **LIMITS)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation inside returns, in entries."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        for each in found if isinstance(found, list | tuple) else [found]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, local_of(each).numel())
        return found


def sends_views_alone(rank):
    """A step sends views of the buffer, and makes no tensor that is larger; also with few rows."""
    sent = []
    begin = NeighborExchange.start

    def spy(exchange, sends, receives):
        sent.extend(each for each in sends if not each.is_header)
        return begin(exchange, sends, receives)

    module, optimizer, trainer = start(TWO, SGP(OnePeerExponential(2)), make=build_even)
    (buffer,) = trainer._buckets.buffers
    backward(trainer, optimizer, *batch(0, *place(TWO)))
    with mock.patch.object(NeighborExchange, "start", spy), Largest() as largest:
        optimizer.step()
    storage = buffer.untyped_storage()
    assert sum(each.tensor.nbytes for each in sent) == bytes_to_others(TWO, module)
    assert all(each.tensor.untyped_storage().data_ptr() == storage.data_ptr() for each in sent)
    assert 0 < largest.numel <= buffer.numel() < sum(p.numel() for p in module.parameters())
    peers = {0: {2, 3}, 1: {3, 4}, 2: {0}, 3: {0, 1}, 4: {1}}
    assert {each.peer for each in sent} <= peers[rank]
    assert len(module[2].weight.to_local()) == 2 * (rank < 4)  # four rows on two or three ranks
    trainer.close()


class WithBuffers(nn.Module):
    """Frozen parameters and buffers, which ranks begin with too."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 7).requires_grad_(False)
        self.norm, self.last = nn.BatchNorm1d(7), nn.Linear(7, 4)

    def forward(self, x):
        return self.last(self.norm(self.frozen(x)))


def begins_with_the_first_replica(rank):
    """Frozen parameters and buffers become the first rank's; consensus averages buffers."""
    torch.manual_seed(rank)
    module = WithBuffers()
    module.norm.running_mean.fill_(rank + 1.0)
    module = shard(module, make_mesh(TWO))
    whole = {name: p.full_tensor().detach().clone() for name, p in module.named_parameters()}
    expected = [whole if rank == 0 else None]
    dist.broadcast_object_list(expected)
    optimizer = SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    trainer = GossipDataParallel(module, optimizer, SGP(OnePeerExponential(2)), replica_ranks=TWO)
    for name, found in full(module).items():
        torch.testing.assert_close(found, expected[0][name])
    assert torch.equal(module.norm.running_mean, torch.ones(7))
    module.norm.running_mean.fill_(float(rank))
    with trainer.consensus() as average:
        assert torch.equal(average.norm.running_mean, torch.full((7,), 2.0))
    backward(trainer, optimizer, *batch(0, *place(TWO)))
    optimizer.step()
    trainer.close()


def wrap(module, algorithm=None, *, ranks=TWO, **options):
    algorithm = algorithm or SGP(OnePeerExponential(2))
    optimizer = SGD(module.parameters(), lr=0.1)
    return GossipDataParallel(module, optimizer, algorithm, replica_ranks=ranks, **options)


def cut_columns(mesh):
    return fully_shard(nn.Linear(6, 9), mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def another(mesh, module):
    """Return a sharded module that is another one on the second replica."""
    return shard(module if place(TWO)[0] else nn.Sequential(nn.Linear(6, 4)), mesh)


ONCE = r"replica_ranks must have each of the 5 ranks of the default group in one replica, got "
SENDS = "algorithm must send rows with replica_ranks, as SGP, .* got "
LISTS = "replica_ranks must be lists of the ranks of each replica such as .*, got "
MISTAKES = [
    ("a number", lambda m: wrap(shard(build(), m), ranks=2), f"{LISTS}2"),
    ("flat", lambda m: wrap(shard(build(), m), ranks=[0, 1, 2]), f"{LISTS}a list of 3"),
    ("empty", lambda m: wrap(shard(build(), m), ranks=[[0, 1, 2, 3, 4], []]), f"{LISTS}a list of"),
    ("none", lambda m: wrap(shard(build(), m), ranks=[[0, 1], [2, 3]]), f"{ONCE}rank 4 no times"),
    ("two", lambda m: wrap(shard(build(), m), ranks=[*TWO, [1]]), f"{ONCE}rank 1 2 times"),
    ("no rank", lambda m: wrap(shard(build(), m), ranks=[*TWO, [5]]), f"{ONCE}5, which is no rank"),
    ("of one rank", lambda m: wrap(shard(build(), m), ranks=[[0], [1]] if dist.get_rank() else TWO),
     f"ranks 1-4: {ONCE}rank 2 no times"),
    ("another order", lambda m: wrap(shard(build(), m), ranks=TWO[:: 1 if dist.get_rank() else -1]),
     "all ranks must have the same replica_ranks, got .* on rank 0 and .* on rank 1"),
    ("with a mesh", lambda m: wrap(shard(build(), m), mesh=m), "mesh must be None with replica"),
    ("with a group", lambda m: wrap(shard(build(), m), process_group=dist.group.WORLD),
     "process_group must be None with replica_ranks"),
    ("with a cap", lambda m: wrap(shard(build(), m), bucket_cap_mb=1), "bucket_cap_mb must be No"),
    ("other ranks", lambda m: wrap(shard(build(), m), ranks=[[0, 2], [1, 3, 4]]),
     r"module must be sharded over the ranks of its replica, \[0, 2\] .*, got a mesh of \[0, 1\]"),
    ("plain", lambda m: wrap(build()), "module must be sharded by fully_shard"),
    ("plain on one rank", lambda m: wrap(shard(build(), m) if dist.get_rank() != 3 else build()),
     "rank 3: module must be sharded by fully_shard"),
    ("columns", lambda m: wrap(cut_columns(m)),
     "parameters must be sharded by rows with replica_ranks, . of weight, got 9, of .*dim=1"),
    ("names", lambda m: wrap(another(m, nn.Sequential(OrderedDict(a=nn.Linear(6, 4))))),
     "all ranks must have the same parameter 0, got 0.weight float32 .* and a.weight float32"),
    ("rows", lambda m: wrap(another(m, nn.Sequential(nn.Linear(6, 5)))),
     r"all ranks must have the same parameter 0, got .*\[4, 6\] on rank 0 and .*\[5, 6\] on rank "),
    ("dtypes", lambda m: wrap(another(m, nn.Sequential(nn.Linear(6, 4).double()))),
     "all ranks must have the same parameter 0, got .*float32 .* and .*float64"),
    ("count", lambda m: wrap(another(m, nn.Sequential(nn.Linear(6, 4, False)))),
     "all ranks must have the same number of parameters, got 2 on rank 0 and 1 on rank 2"),
    ("topology", lambda m: wrap(shard(build(), m), SGP(OnePeerExponential(5))),
     "2 ranks, got OnePeerExponential.5.*, or of replicas that are sharded their number"),
    ("a length", lambda m: wrap(shard(build(), m), SGP(Ring(2), compressor=Threshold(1.0))),
     "compressor must make messages of one length|compressor must"),
    ("memory", lambda m: wrap(shard(build(), m), SGP(Ring(2), transport="symmetric_memory")),
     SENDS),
    *((type(each).__name__, lambda m, each=each: wrap(shard(build(), m), each),
       f"{SENDS}{type(each).__name__}")
      for each in (ADPSGD(Ring(2)), AllReduce(), LocalSGD(2, compressor=Threshold(1.0)),
                   StreamingDiLoCo(9), DiLoCo(4, fragments=2), SlowMo(SGP(Ring(2)), interval=2))),
]  # fmt: skip


def refuses_mistakes(rank):
    """Every mistake is an error of the same type on all ranks, of which none has sent anything."""
    mesh = make_mesh(TWO)
    for name, make, text in MISTAKES:
        with (
            mock.patch.object(NeighborExchange, "start", side_effect=AssertionError),
            pytest.raises((ValueError, TypeError), match=text) as found,
        ):
            make(mesh)
        assert_equal_on_all_ranks((name, found.type.__name__))


def leaves_out_steps_together(rank):
    """A nan in one shard leaves out the update of all its replica's, and is told to all ranks."""
    module, optimizer, trainer = start(TWO, SGP(OnePeerExponential(2)))
    before = snapshot(module)
    backward(trainer, optimizer, *batch(0, *place(TWO)))
    if rank == 3:
        module.first.weight.grad.to_local().view(-1)[0] = torch.nan
    with pytest.raises(NonFiniteError, match="gradients must be finite"), trainer.no_sync():
        optimizer.step() if rank > 1 else raises(optimizer)
    moved = [not torch.equal(a, p.to_local()) for a, p in zip(before, module.parameters(),
             strict=True) if a.numel()]  # fmt: skip
    assert all(moved) if rank < 2 else not any(moved)
    backward(trainer, optimizer, *batch(1, *place(TWO)))
    if rank == 3:
        module.first.weight.grad.to_local().view(-1)[0] = torch.nan
    with pytest.raises(NonFiniteError, match="gradients must be finite"):
        optimizer.step()  # on all ranks of the replica that receives too
    assert trainer.metrics()["rank/skipped_steps"] == 2 * (rank > 1)
    assert trainer.consensus_distance() == pytest.approx(0, abs=1e-5)
    trainer.close()


def raises(optimizer):
    optimizer.step()
    raise NonFiniteError("gradients must be finite: those of the other replica were not")


def refuses_together(rank, overlap):
    """A message that one rank refuses is merged on no rank of its replica, nor is its mass."""
    algorithm = SGP(FromMatrix(np.array(SKEWED[2])), overlap=overlap)
    module, optimizer, trainer = start(TWO, algorithm)
    train(TWO, trainer, optimizer, [0])
    trainer.flush()
    weight, before = float(trainer.push_sum_weight), snapshot(module)
    headers = trainer._averager.exchange.headers
    refusal = mock.patch.object(headers, "check_rows", side_effect=PeerError("refused"))
    backward(trainer, optimizer, *batch(1, *place(TWO)))
    optimizer.zero_grad()  # so that the step moves nothing but by the round
    for p in module.parameters():
        p.grad = None
    with refusal if rank == 3 else contextlib.nullcontext():
        outcome = None
        try:
            optimizer.step()
            trainer._averager.flush()  # without the other replica, which raises nothing
        except PeerError as error:
            outcome = str(error)
    if rank > 1:
        text = "refused" if rank == 3 else "got an error on rank 3, which says why"
        assert text in outcome
        assert float(trainer.push_sum_weight) == weight
        torch.testing.assert_close(snapshot(module), before)  # but for w z / w
    else:
        assert outcome is None
    dist.barrier()
    trainer.close()


def resumes_to_the_bit(rank, algorithm, kind):
    folder = shared_folder()
    module, optimizer, trainer = start(TWO, algorithm, kind)
    train(TWO, trainer, optimizer, range(2))
    dcp.save({"gossip": GossipState(trainer, optimizer)}, checkpoint_id=folder)
    train(TWO, trainer, optimizer, range(2, 4))
    expected = snapshot(module)
    trainer.close()
    module, optimizer, trainer = start(TWO, algorithm, kind)
    train(TWO, trainer, optimizer, range(10, 11))  # to be overwritten
    GossipState(trainer, optimizer).load(folder)
    train(TWO, trainer, optimizer, range(2, 4))
    assert all(map(torch.equal, expected, snapshot(module)))
    trainer.close()
    module, optimizer, trainer = start(TWO[::-1], algorithm, kind)  # as if the mesh had changed
    with pytest.raises(DisagreementError, match="state_dict must be of the same replica_ranks"):
        GossipState(trainer, optimizer).load(folder)
    trainer.close()


def saves_the_consensus_once(rank):
    """The first replica saves the consensus; FSDP2 on another mesh loads it."""
    folder = shared_folder()
    module, optimizer, trainer = start(TWO, SGP(FromMatrix(np.array(SKEWED[2]))))
    train(TWO, trainer, optimizer, range(2))
    group = next(module.parameters()).device_mesh.get_group()
    with trainer.consensus() as average:
        expected = full(average)
        if rank in TWO[0]:
            state = {"model": get_model_state_dict(average)}
            dcp.save(state, checkpoint_id=folder, process_group=group)
    dist.barrier()
    plain = shard(build(), DeviceMesh("cpu", range(5)))
    state = get_model_state_dict(plain)
    dcp.load({"model": state}, checkpoint_id=folder)
    set_model_state_dict(plain, state)
    assert all(torch.equal(full(plain)[name], each) for name, each in expected.items())
    trainer.close()


def joins(rank):
    """The first replica has a batch more, whose round the other takes too."""
    _, optimizer, trainer = start(TWO, SGP(OnePeerExponential(2)))
    with trainer.join():
        train(TWO, trainer, optimizer, range(3 if rank < 2 else 2))
    assert trainer.consensus_distance() == pytest.approx(0, abs=1e-6)
    trainer.close()


SKEWED_SGP = SGP(FromMatrix(np.array(SKEWED[2])), overlap=1)


@pytest.mark.slow
def test_messages_and_mistakes_are_of_whole_replicas(ranks):
    rows = [
        (refuses_mistakes,),
        (sends_views_alone,),
        (leaves_out_steps_together,),
        (refuses_together, 0),
        (resumes_to_the_bit, SKEWED_SGP, FUSED_ADAMW),
    ]
    ranks.run(5, call_each, rows, **LIMITS)


@pytest.mark.slow
def test_other_states_of_whole_replicas(ranks):
    rows = [
        (begins_with_the_first_replica,),
        (refuses_together, 1),
        (resumes_to_the_bit, OSGP(OnePeerExponential(2)), ADAMW),
        (saves_the_consensus_once,),
        (joins,),
    ]
    ranks.run(5, call_each, rows, **LIMITS)
