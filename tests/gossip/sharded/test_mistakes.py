"""Mistakes, bad gradients and refused messages of one shard are of all ranks of its replica."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import pyparallel.optim
from pyparallel import GossipDataParallel, PipelineTrainer, SubnetTrainer
from pyparallel.comm import DisagreementError, NonFiniteError, PeerError
from pyparallel.gossip import ADPSGD, SGP, AllReduce, Hierarchical
from pyparallel.gossip.messages import NeighborExchange
from pyparallel.gossip.topology import OnePeerExponential, Ring
from pyparallel.pipeline import OneForwardOneBackward
from pyparallel.subnets import Partition
from tests.gossip.sharded.test_shards import (
    FUSED_SGD,
    SGD,
    backward,
    batch,
    build,
    make_mesh,
    shard,
    start,
    train,
)
from tests.workers import assert_equal_on_all_ranks, call_each

SGP2 = SGP(OnePeerExponential(2))


def wrap(module, algorithm=SGP2, **options):
    return GossipDataParallel(module, SGD(module.parameters(), lr=0.1), algorithm, **options)


def shard_layers_only(mesh):
    module = build()
    for child in module.children():
        fully_shard(child, mesh=mesh["shard"])
    return module


def shard_but_one(mesh):
    module = build()
    return fully_shard(module, mesh=mesh["shard"], ignored_params={module.scale})


def step_sharded_later(mesh, *, other_optimizer=False):
    module = build()
    optimizer = SGD(module.parameters(), lr=0.1)
    group = mesh["replicate"].get_group()
    trainer = GossipDataParallel(module, optimizer, SGP2, process_group=group)
    shard(module, mesh["shard"])
    if other_optimizer:
        optimizer = SGD(module.parameters(), lr=0.1)
    train(mesh, trainer, optimizer, [0])


def step_fused_alone(mesh):
    module = shard(build(), mesh["shard"])
    optimizer = pyparallel.optim.AdamW(module.parameters())
    train(mesh, module, optimizer, [0])


def make_pipeline(mesh):
    layers = [fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]) for _ in range(4)]
    return PipelineTrainer(
        layers, OneForwardOneBackward(), nn.functional.mse_loss, SGD, num_microbatches=4
    )


def of_one_rank(module):
    return SGP2 if dist.get_rank() else SGP(OnePeerExponential(2), overlap=1)


def on(mesh, module, algorithm=SGP2, **options):
    return wrap(module, algorithm, mesh=mesh["replicate"], **options)


MISTAKES = [
    ("no mesh", lambda m: wrap(shard(build(), m["shard"])), "mesh must be given for a module that"),
    ("the shards' mesh", lambda m: wrap(shard(build(), m["shard"]), mesh=m["shard"]),
     "mesh must have the ranks that hold the same shard of other replicas"),
    ("the whole mesh", lambda m: wrap(shard(build(), m["shard"]), mesh=m),
     r"mesh must have one dimension, got 2 of sizes \[2, 2\]"),
    ("no mesh at all", lambda m: wrap(shard(build(), m["shard"]), mesh=2), "mesh must be a Devic"),
    ("twins", lambda m: wrap(shard(build(), m["shard"]), mesh=DeviceMesh(
        "cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("a", "b"))["a"]),
     "all ranks must have the same shard of the module, got"),
    ("no module", lambda m: GossipDataParallel(3, SGD([torch.zeros(1)]), SGP2, mesh=m["replicate"]),
     "module must be a torch.nn.Module, got 3"),
    ("both", lambda m: on(m, shard(build(), m["shard"]), process_group=dist.group.WORLD),
     "process_group must be None with mesh"),
    ("plain", lambda m: on(m, build()), "module must be sharded by fully_shard over another dim"),
    ("a plain root", lambda m: on(m, shard_layers_only(m)), "module must be sharded as a whole"),
    ("one plain", lambda m: on(m, shard_but_one(m)),
     "parameters must all be sharded, .* got scale as a plain one beside first.weight"),
    ("HSDP", lambda m: on(m, shard(build(), m)),
     r"parameters must be sharded in one dimension, got scale with placements \[Replicate"),
    ("on one rank", lambda m: on(m, shard(build(), m["shard"]), of_one_rank(m)),
     "all ranks must have the same algorithm"),
    ("AD-PSGD", lambda m: on(m, shard(build(), m["shard"]), ADPSGD(Ring(2))),
     "algorithm must take the same rounds for all shards"),
    ("all-reduce", lambda m: on(m, shard(build(), m["shard"]), AllReduce()),
     "algorithm must be a gossip algorithm for a module that fully_shard has sharded"),
    ("nodes", lambda m: on(m, shard(build(), m["shard"]), Hierarchical(SGP2, 1)),
     "algorithm must be the one between replicas"),
    ("sharded later", step_sharded_later, "the module must keep the parameters it was wrapped"),
    ("and stepped", lambda m: step_sharded_later(m, other_optimizer=True),
     "a trainer's optimizer must be kept and stepped"),
    ("fused alone", step_fused_alone, "must be stepped in a GossipDataParallel with mesh="),
    ("a pipeline", make_pipeline, r"layers\[0\] must have whole parameters on this rank, got wei"),
    ("subnets", lambda m: SubnetTrainer(
        shard(build(), m["shard"]), SGD, partition=Partition(), interval=3),
     "module must have whole parameters on this rank, got scale, which is a DTensor"),
]  # fmt: skip


def refuses_unalike_arguments(rank):
    """Ranks with a mesh and ranks without one raise one sentence, and send nothing."""
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard"))

    def wrap_with(number):
        if number == "none":
            return wrap(build(), SGP(Ring(3)))
        return wrap(shard(build(), mesh["shard"]), SGP(Ring(3)), mesh=mesh["replicate"])

    for first, other in (("none", "one"), ("one", "none")):
        text = f"all ranks must have the same mesh, got {first} on rank 0 and {other} on rank 1$"
        with (
            mock.patch.object(NeighborExchange, "start", side_effect=AssertionError),
            pytest.raises(DisagreementError, match=text),
        ):
            wrap_with(other if rank % 2 else first)
    module = build() if rank == 1 else shard(build(), mesh["shard"])
    with pytest.raises(DisagreementError, match="rank 1: module must be sharded by fully_shard"):
        wrap(module, SGP(Ring(3)), mesh=mesh["replicate"])
    wrap_with("one").close()  # the groups still work


def test_unalike_arguments_are_errors_of_all_ranks(ranks):
    ranks.run(3, refuses_unalike_arguments, group_timeout=20)


def refuses_mistakes(rank):
    """Every mistake is an error of the same type on all ranks, which then are still in step."""
    mesh = make_mesh()
    for name, make, text in MISTAKES:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text) as found:
            make(mesh)
        assert_equal_on_all_ranks((name, found.type.__name__))


def leaves_out_steps_together(rank, kind, policy):
    """A nan in one shard leaves out the update of all its replica's, and is told to all ranks."""
    mesh = make_mesh()
    module, optimizer, trainer = start(mesh, SGP2, kind, nonfinite=policy)
    start_weights = [p.to_local().clone() for p in module.parameters()]
    with trainer.no_sync():
        backward(trainer, optimizer, *batch(0, *mesh.get_coordinate()))
        if rank == 1:
            module.first.weight.grad.to_local().view(-1)[0] = torch.nan
        if policy == "raise" and rank < 2:
            text = "1 elements that are nan or inf, the first in first.weight"
            with pytest.raises(NonFiniteError, match=text):
                optimizer.step()
        else:
            optimizer.step()
    pairs = zip(start_weights, module.parameters(), strict=True)
    moved = [not torch.equal(before, p.to_local()) for before, p in pairs if before.numel()]
    assert all(moved) if rank > 1 else not any(moved)
    assert trainer.metrics()["rank/skipped_steps"] == (rank < 2)
    backward(trainer, optimizer, *batch(1, *mesh.get_coordinate()))
    if rank == 1:
        module.first.weight.grad.to_local().view(-1)[0] = torch.nan
    if policy == "raise":  # also on both ranks of the replica that receives
        with pytest.raises(NonFiniteError, match="gradients must be finite"):
            optimizer.step()
    else:
        optimizer.step()
    assert all(p.to_local().isfinite().all() for p in module.parameters())
    trainer.close()


def raises_on_the_whole_replica(rank, overlap):
    """A message that one shard's rank refuses ends the round on the other ranks of its replica."""
    mesh = make_mesh()
    algorithm = SGP(OnePeerExponential(2), overlap=overlap)
    _, optimizer, trainer = start(mesh, algorithm)
    if rank == 3:
        trainer._run.counts.count_step()  # as if it had taken a step more
    refused = "must be sent after as many optimizer steps"
    text = refused if rank in (1, 3) else f"got an error on rank {rank + 1}, which says why"
    with pytest.raises(PeerError, match=text):
        train(mesh, trainer, optimizer, range(2))
    dist.barrier()
    trainer.close()


def trains_with_mixed_precision(rank):
    """Shards and messages are float32 where FSDP2 computes in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = make_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    module = shard(build(), mesh["shard"], mp_policy=policy)
    optimizer = FUSED_SGD(module.parameters(), lr=0.05)
    with torch.no_grad():
        module(torch.randn(3, 6))  # gathers parameters
    trainer = GossipDataParallel(module, optimizer, SGP2, mesh=mesh["replicate"])
    train(mesh, trainer, optimizer, range(2))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert trainer.consensus_distance() < 1e-6
    trainer.close()


def test_mistakes_are_errors_of_all_ranks(ranks):
    rows = [
        (refuses_mistakes,),
        (leaves_out_steps_together, FUSED_SGD, "raise"),
        (raises_on_the_whole_replica, 1),
    ]
    ranks.run(4, call_each, rows)


@pytest.mark.slow
def test_other_steps_are_of_the_whole_replica(ranks):
    rows = [
        (leaves_out_steps_together, kind, p) for kind in (SGD, FUSED_SGD) for p in ("raise", "skip")
    ]
    rows += [(raises_on_the_whole_replica, 0), (trains_with_mixed_precision,)]
    ranks.run(4, call_each, rows)
