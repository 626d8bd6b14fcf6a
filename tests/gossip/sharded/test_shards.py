"""Replicas that FSDP2 has sharded train as unsharded ones on the joined batches of their ranks."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pyparallel.optim
from pyparallel import GossipDataParallel
from pyparallel.compression import ErrorFeedback, Int8, TopK
from pyparallel.gossip import DPSGD, OSGP, SGP, DiLoCo, LeaderSGD, LocalSGD, NoLoCo, SlowMo
from pyparallel.gossip.topology import Lazy, OnePeerExponential, RandomMatching, Ring, Star
from tests.cases import nightly
from tests.workers import call_each

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
FUSED_SGD, FUSED_ADAMW = pyparallel.optim.SGD, pyparallel.optim.AdamW


class Uneven(nn.Module):
    """Over two ranks one has nothing of ``scale``, and less of most others; over three likewise."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 5)
        self.scale, self.last = nn.Parameter(torch.ones(1)), nn.Linear(5, 4)

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh() * self.scale)


def build_even():
    """A model whose shards are whole blocks of 256 entries and fill their places in the buffers."""
    return nn.Sequential(nn.Linear(6, 1024, False), nn.Tanh(), nn.Linear(1024, 4, False))


def build(make=Uneven, dtype=torch.float32):
    torch.manual_seed(3)
    return make().to(dtype)


def shard(module, mesh, **options):
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def make_mesh(num_replicas=2):
    size = num_replicas, dist.get_world_size() // num_replicas
    return init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))


def start(mesh, algorithm, kind=SGD, make=Uneven, dtype=torch.float32, **options):
    """Return a sharded module, its optimizer and the trainer."""
    module = shard(build(make, dtype), mesh["shard"])
    optimizer = kind(module.parameters(), lr=0.05, weight_decay=0.01)
    trainer = GossipDataParallel(module, optimizer, algorithm, mesh=mesh["replicate"], **options)
    return module, optimizer, trainer


def batch(step, replica, index):
    generator = torch.Generator().manual_seed(1000 * step + 10 * replica + index)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)


def backward(trainer, optimizer, inputs, targets):
    dtype = next(trainer.parameters()).dtype
    inputs, targets = inputs.to(dtype), targets.to(dtype)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(trainer(inputs), targets)
    if isinstance(trainer, GossipDataParallel):
        trainer.record_loss(loss)
    loss.backward()


def train(mesh, trainer, optimizer, steps):
    for step in steps:
        backward(trainer, optimizer, *batch(step, *mesh.get_coordinate()))
        optimizer.step()


ALGORITHMS = {
    "sgp": lambda n: SGP(Lazy(OnePeerExponential(n), 0.7)),
    "sgp-overlap-1": lambda n: SGP(Lazy(OnePeerExponential(n), 0.7), overlap=1),
    "sgp-star-overlap-2": lambda n: SGP(Star(n), overlap=2),
    "osgp": lambda n: OSGP(Star(n)),
    "dpsgd": lambda n: DPSGD(Lazy(Ring(n), 0.4)),
    "localsgd": lambda n: LocalSGD(interval=2),
    "slowmo": lambda n: SlowMo(SGP(Lazy(OnePeerExponential(n), 0.7)), interval=2),
    "diloco": lambda n: DiLoCo(interval=2),
    "diloco-streamed": lambda n: DiLoCo(4, fragments=2, delay=1),
    "noloco": lambda n: NoLoCo(RandomMatching(n), interval=2),
    "leadersgd": lambda n: LeaderSGD(1, interval=2, global_interval=2),
    "sgp-int8": lambda n: SGP(Lazy(OnePeerExponential(n), 0.7), compressor=Int8()),
    "diloco-int8": lambda n: DiLoCo(interval=2, compressor=ErrorFeedback(Int8())),
    "noloco-int8": lambda n: NoLoCo(RandomMatching(n), interval=2, compressor=Int8()),
    "sgp-top-k": lambda n: SGP(Lazy(OnePeerExponential(n), 0.7), overlap=1, compressor=TopK(0.2)),
    "diloco-top-k": lambda n: DiLoCo(interval=2, compressor=ErrorFeedback(TopK(0.2))),
}


def equals_joined_batches(
    rank, name, kind=SGD, num_replicas=2, make=Uneven, num_steps=6, dtype=torch.float32
):
    """Compare with unsharded replicas, each on the batches of all the ranks of a replica."""
    exact = 1e-6 if dtype == torch.float32 else 1e-12
    mesh = make_mesh(num_replicas)
    replica, _ = mesh.get_coordinate()
    algorithm = ALGORITHMS[name](num_replicas)
    module, optimizer, trainer = start(mesh, algorithm, kind, make, dtype)
    plain = build(make, dtype)
    own = kind(plain.parameters(), lr=0.05, weight_decay=0.01)
    group = mesh["replicate"].get_group()
    joined = GossipDataParallel(plain, own, algorithm, process_group=group)
    for step in range(num_steps):
        train(mesh, trainer, optimizer, [step])
        batches = [batch(step, replica, index) for index in range(mesh["shard"].size())]
        backward(joined, own, *map(torch.cat, zip(*batches, strict=True)))
        own.step()
        for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            difference = (mine.full_tensor() - theirs).detach().abs()
            # A value between two codes may become either, and then differs by their distance.
            if "int8" in name:
                assert (difference > 1e-6).float().mean() < 0.05
            assert difference.max() < (1e-4 if "int8" in name else exact), (name, step)
    assert trainer.push_sum_weight == joined.push_sum_weight
    assert trainer.consensus_distance() == pytest.approx(joined.consensus_distance(), abs=1e-4)
    inputs = batch(100, 0, 0)[0].to(dtype)
    most = 1e-3 if "int8" in name else exact
    with torch.no_grad():
        trainer(inputs)  # gathers what the next lines change
        with trainer.consensus() as average, joined.consensus() as expected:
            torch.testing.assert_close(average(inputs), expected(inputs), rtol=exact, atol=most)
        torch.testing.assert_close(trainer(inputs), joined(inputs), rtol=exact, atol=most)
    if make is build_even:  # its exact part, and of a header 64 bytes, which each message has
        size = mesh["shard"].size()
        assert trainer._buckets.num_bytes * size == joined._buckets.num_bytes
        num_headers = (trainer.bytes_sent * size - joined.bytes_sent) / (64 * (size - 1))
        assert num_headers == int(num_headers) <= num_steps
    trainer.close()
    joined.close()


def trains_each_shard_alone(rank, name, kind=SGD, num_replicas=2, make=Uneven):
    """Compare, to the bit, with a plain trainer of what a rank holds, by the same gradients."""
    mesh = make_mesh(num_replicas)
    algorithm = ALGORITHMS[name](num_replicas)
    module, optimizer, trainer = start(mesh, algorithm, kind, make)
    plain = nn.ParameterList([p.to_local().detach().clone() for p in module.parameters()])
    own = kind(plain.parameters(), lr=0.05, weight_decay=0.01)
    group = mesh["replicate"].get_group()
    alone = GossipDataParallel(plain, own, algorithm, process_group=group)
    for step in range(6):
        backward(trainer, optimizer, *batch(step, *mesh.get_coordinate()))
        for mine, theirs in zip(plain.parameters(), module.parameters(), strict=True):
            mine.grad = theirs.grad.to_local().clone()
        optimizer.step()
        own.step()
        for mine, theirs in zip(plain.parameters(), module.parameters(), strict=True):
            assert torch.equal(mine, theirs.to_local()), (name, step)
    if make is build_even:  # else the padding of FSDP2 is sent too
        assert trainer.bytes_sent == alone.bytes_sent
    trainer.close()
    alone.close()


JOINED = [name for name in ALGORITHMS if "int8" not in name and "top-k" not in name]
IN_FLOAT64 = {"dtype": torch.float64}
QUICK = [
    (partial(equals_joined_batches, **IN_FLOAT64), "sgp-star-overlap-2", SGD),
    (equals_joined_batches, "sgp-overlap-1", FUSED_ADAMW),
    (equals_joined_batches, "sgp-int8", FUSED_SGD, 2, build_even),
    (trains_each_shard_alone, "diloco-top-k", ADAMW, 2, build_even),
]


def test_shards_equal_joined_batches(ranks):
    ranks.run(4, call_each, QUICK)


COMPRESSED = [name for name in ALGORITHMS if name not in JOINED]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SGD, nightly(ADAMW), nightly(FUSED_SGD), FUSED_ADAMW])
def test_every_algorithm_equals_joined_batches(ranks, kind):
    rows = [(equals_joined_batches, name, kind) for name in JOINED]
    rows += [(equals_joined_batches, name, kind, 2, build_even) for name in ("sgp", "noloco")]
    if kind in (SGD, ADAMW):
        rows += [(partial(equals_joined_batches, **IN_FLOAT64), name, kind) for name in JOINED]
    rows += [(trains_each_shard_alone, name, kind, 2, build_even) for name in COMPRESSED]
    ranks.run(4, call_each, rows, time_limit=180)


def build_matrices():
    return nn.Sequential(nn.Linear(6, 9, False), nn.Tanh(), nn.Linear(9, 4, False))


def equals_joined_batches_with_muon(rank, name):
    """Compare with torch's Muon, which computes in bfloat16, in float32."""
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
        equals_joined_batches(rank, name, torch.optim.Muon, make=build_matrices)


@pytest.mark.slow
def test_muon_equals_joined_batches(ranks):
    names = ("sgp", "sgp-overlap-1", "osgp", "diloco", "noloco")
    rows = [(equals_joined_batches_with_muon, name) for name in names]
    ranks.run(4, call_each, rows, time_limit=180)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_six_ranks_equal_joined_batches(ranks, num_replicas):
    names = JOINED if num_replicas == 2 else ("sgp-star-overlap-2", "dpsgd", "noloco", "leadersgd")
    rows = [(equals_joined_batches, name, SGD, num_replicas) for name in names]
    rows += [(equals_joined_batches, "sgp-overlap-1", FUSED_ADAMW, num_replicas)]
    rows += [(trains_each_shard_alone, "sgp-top-k", SGD, num_replicas)]
    ranks.run(6, call_each, rows, time_limit=240)
